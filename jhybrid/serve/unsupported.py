"""Fields of OpenAI's, vLLM's and SGLang's servers that change an answer and are not done here.

They are refused, where a field that no server knows, or that changes no answer (user, metadata,
store, ...), is ignored. Beside each stand the values, besides null, that ask for what is done
anyway. A field of the other route is one of them: `max_completion_tokens` in a completion, say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jhybrid.serve.errors import invalid, shown

Unsupported = Mapping[str, tuple[Any, ...]]

_OFF = (False, "", [], {})
_BOTH: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    **dict.fromkeys(("structured_outputs", "structural_tag", "json_schema", "regex", "ebnf"), _OFF),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), _OFF),
    **dict.fromkeys(("logits_processors", "custom_logit_processor", "lora_path"), _OFF),
    **dict.fromkeys(("bad_words", "allowed_token_ids", "use_beam_search"), _OFF),
    "length_penalty": (1,),
    "typical_p": (1,),
    **dict.fromkeys(("include_stop_str_in_output", "no_stop_trim"), _OFF),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    **dict.fromkeys(("return_token_ids", "return_tokens_as_token_ids"), _OFF),
    "thinking_token_budget": (),
}
OF_COMPLETIONS: Unsupported = {
    **_BOTH,
    "add_special_tokens": (True,),
    **dict.fromkeys(("messages", "max_completion_tokens"), ()),
    "top_logprobs": (0,),
    **dict.fromkeys(("tools", "chat_template_kwargs"), _OFF),
    **dict.fromkeys(("add_generation_prompt", "continue_final_message"), _OFF),
}
OF_CHAT: Unsupported = {
    **_BOTH,
    "add_special_tokens": (False,),
    "prompt": (),
    "echo": (False,),
    "best_of": (1,),
    **dict.fromkeys(("functions", "documents", "audio", "chat_template"), _OFF),
    **dict.fromkeys(("function_call", "tool_choice"), ("auto", "none")),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    **dict.fromkeys(("reasoning_effort", "enable_thinking", "thinking", "web_search_options"), ()),
}


def refuse_unsupported(body: Mapping[str, Any], unsupported: Unsupported) -> None:
    """A 400 for the first field whose value asks for something that is not done."""
    for name, value in body.items():
        if name in unsupported and value is not None and not _same(value, unsupported[name]):
            known = " or ".join(["null", *map(shown, unsupported[name])])
            message = f"{name}: is not supported here, expected {known}, got {shown(value)}"
            raise invalid(message, name, code="unsupported_parameter")


def _same(value: Any, known: tuple[Any, ...]) -> bool:
    """Whether it is one of them; for Python `True` is `1`, for JSON it is not."""
    return any(value == x and isinstance(value, bool) == isinstance(x, bool) for x in known)
