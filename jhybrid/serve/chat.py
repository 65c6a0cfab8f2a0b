"""Prompts to token ids: chat templates and plain text, one at a time off the event loop."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jhybrid.serve.errors import invalid
from jhybrid.serve.protocol import ChatRequest, CompletionRequest, Message

# What chat_template_kwargs may not set, because the request has a field or we depend on it.
RESERVED_TEMPLATE_KWARGS = frozenset(
    "conversation messages tools chat_template tokenize return_dict return_tensors padding "
    "truncation max_length add_generation_prompt continue_final_message tokenizer_kwargs "
    "return_assistant_tokens_mask documents sanitize_control_tokens".split()
)


class PromptEncoder:
    """Tokenises for the server. One worker: tokenizers are not safe to share between threads."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="jhybrid-tokenize")

    def close(self) -> None:
        self._worker.shutdown()

    async def chat(self, request: ChatRequest) -> list[int]:
        return await self._run(chat_token_ids, self._tokenizer, request)

    async def completion(self, request: CompletionRequest) -> list[list[int]]:
        """Token ids of every prompt; an empty one is refused by name."""
        prompt = request.prompt
        if isinstance(prompt, str):
            prompts, names = [prompt], ["prompt"]
        elif prompt and isinstance(prompt[0], int):
            prompts, names = [prompt], ["prompt"]
        else:
            prompts, names = prompt, [f"prompt[{i}]" for i in range(len(prompt))]
        if not prompts:
            raise invalid("prompt: should not be empty", "prompt")
        encoded = await self._run(lambda: [self._encode(p) for p in prompts])
        for prompt, ids, name in zip(prompts, encoded, names, strict=True):
            if not prompt or not ids:
                raise invalid(f"{name}: should not be empty", name)
        return encoded

    def _encode(self, prompt: Any) -> list[int]:
        return self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    async def _run(self, function: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._worker, function, *args)


def chat_token_ids(tokenizer: Any, request: ChatRequest) -> list[int]:
    """The conversation through the model's chat template.

    A final assistant message is continued unless the request says otherwise: that is how
    evaluation harnesses send the beginning of an answer.
    """
    if not tokenizer.chat_template:
        raise invalid("this model has no chat template; use /v1/completions", "messages")
    extra = request.chat_template_kwargs or {}
    for name in extra:
        if name in RESERVED_TEMPLATE_KWARGS:
            param = f"chat_template_kwargs.{name}"
            raise invalid(f"{param}: may not be set here", param)
    for i, message in enumerate(request.messages):
        if message.content is None and message.role != "assistant":
            raise invalid(f"messages[{i}].content: is missing", f"messages[{i}].content")
    opens, continues = _turn(request)
    try:
        text = tokenizer.apply_chat_template(
            [template_message(message) for message in request.messages],
            tools=request.tools,
            add_generation_prompt=opens,
            continue_final_message=continues,
            tokenize=False,
            **extra,
        )
    except Exception as error:
        # A template is a program run on the client's data: it refuses conversations (order of
        # roles, say) by raising, and stumbles over odd ones in every way Python knows.
        message = f"messages: the chat template refused them: {str(error)[:200]}"
        raise invalid(message, "messages") from None
    return tokenizer.encode(text, add_special_tokens=False)


def template_message(message: Message) -> dict[str, Any]:
    """A message as templates know it, with text parts joined into one string."""
    fields = {**(message.model_extra or {}), "role": message.role}
    if message.content is not None:
        content = message.content
        parts = content if isinstance(content, str) else "".join(part.text for part in content)
        fields["content"] = parts
    return fields


def _turn(request: ChatRequest) -> tuple[bool, bool]:
    """(open a new assistant turn, continue the last message)"""
    opens, continues = request.add_generation_prompt, request.continue_final_message
    if opens and continues:
        message = "continue_final_message and add_generation_prompt exclude each other"
        raise invalid(message, "continue_final_message")
    last = request.messages[-1]
    if continues is None:
        continues = opens is None and last.role == "assistant" and last.content is not None
    if continues and last.content is None:
        name = f"messages[{len(request.messages) - 1}].content"
        raise invalid(f"{name}: nothing to continue", name)
    return (not continues if opens is None else opens), continues
