"""Request bodies of the OpenAI routes and their translation into SamplingParams.

Types are strict: "5" is not 5 and true is not 1. Null means default. Unknown fields are ignored,
but for those that other servers know and this one cannot honour (`unsupported`), and for those of
`prefix_cache`, which is of this server alone: there an unknown name is a misspelt one.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    FailFast,
    Field,
    Tag,
    ValidationError,
)

from jhybrid.engine.request import PrefixCacheOptions, RecoveryName, SamplingParams
from jhybrid.serve.errors import ApiError, invalid, shown
from jhybrid.serve.unsupported import (
    OF_CHAT,
    OF_COMPLETIONS,
    Unsupported,
    refuse_unsupported,
)

MAX_CHOICES = 128


class StrictModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


def _kind_of(value: Any) -> str | None:
    """Which alternative of a union a JSON value means to be, judged by its first element."""
    if isinstance(value, str):
        return "<string>"
    if not isinstance(value, list):
        return None
    first = value[0] if value else None
    if isinstance(first, list):
        return "<id lists>"
    return "<ids>" if isinstance(first, int) and not isinstance(first, bool) else "<list>"


def _one_of(expected: str) -> Discriminator:
    return Discriminator(
        _kind_of, custom_error_type="wrong_type", custom_error_message=f"Input should be {expected}"
    )


class FirstError(FailFast):
    """Stop at a list's first wrong element (a prompt may have 100,000); usable in unions."""

    def __hash__(self) -> int:  # unions remove duplicates, and FailFast itself is unhashable
        return id(self)


# Alternatives carry a <tag>, so that an error names the element and not the alternatives tried.
Ids = Annotated[list[int], FirstError()]
Strings = Annotated[list[str], FirstError()]
Text = Annotated[str, Tag("<string>")]
Stop = Annotated[Text | Annotated[Strings, Tag("<list>")], _one_of("a string or a list of strings")]
Prompt = Annotated[
    Text
    | Annotated[Strings, Tag("<list>")]
    | Annotated[Ids, Tag("<ids>")]
    | Annotated[Annotated[list[Ids], FirstError()], Tag("<id lists>")],
    _one_of("a string, a list of strings, a list of token ids or a list of lists of token ids"),
]


class TextPart(StrictModel):
    type: Literal["text"]
    text: str


Content = Annotated[
    Text | Annotated[list[TextPart], Tag("<list>")], _one_of("a string or a list of text parts")
]


class StreamOptions(StrictModel):
    include_usage: bool | None = None


class PrefixCacheField(StrictModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    recovery: RecoveryName | None = None
    replay_ratio: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None


def _token_bias(value: Any) -> Any:
    """JSON object keys are strings; token ids are not."""
    if not isinstance(value, dict):
        return value
    for key in value:
        if not re.fullmatch(r"[0-9]{1,12}", key):
            raise ValueError("keys should be token ids")
    return {int(key): bias for key, bias in value.items()}


class GenerationFields(StrictModel):
    """What completions and chat have in common. Ranges are SamplingParams' business."""

    unsupported: ClassVar[Unsupported]
    model: str | None = None
    n: Annotated[int, Field(le=MAX_CHOICES)] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[int, float], BeforeValidator(_token_bias)] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: Stop | None = None
    stop_token_ids: Ids | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prefix_cache: PrefixCacheField | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def cache_options(self) -> PrefixCacheOptions:
        field = self.prefix_cache or PrefixCacheField()
        return PrefixCacheOptions(recovery=field.recovery, replay_ratio=field.replay_ratio)

    def _params(self, vocab_size: int, max_context: int, **special: Any) -> SamplingParams:
        names = SamplingParams.__dataclass_fields__.keys() - {"logprobs", "prompt_logprobs"}
        given = {name: getattr(self, name) for name in names}
        given = {name: value for name, value in given.items() if value is not None} | special
        for token in (*(self.logit_bias or ()), *(self.stop_token_ids or ())):
            if not 0 <= token < vocab_size:
                name = "logit_bias" if token in (self.logit_bias or ()) else "stop_token_ids"
                raise invalid(f"{name}: token id {token} is not below {vocab_size}", name)
        try:
            # What the prompt leaves of the context cuts a limit; a limit that no prompt can leave
            # room for is a mistake.
            most, limit = max_context, given.get("max_tokens")
            if limit is not None and limit > most:
                raise ValueError(f"max_tokens must be at most the context's {most}, got {limit}")
            return SamplingParams(**given)
        except ValueError as error:
            raise self._invalid(error) from None

    def _invalid(self, error: ValueError) -> ApiError:
        """By the name that the field has on this route."""
        field = leading_field(error)
        if field is None:
            return invalid(str(error))
        name = self._own_name(field)
        return invalid(name + str(error).removeprefix(field), name)

    def _own_name(self, field: str) -> str:
        return field


class CompletionRequest(GenerationFields):
    unsupported = OF_COMPLETIONS
    prompt: Prompt
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None

    @property
    def prompt_only(self) -> bool:
        """`echo` with `max_tokens` 0 scores a prompt; the one token the engine makes is dropped."""
        return bool(self.echo) and self.max_tokens == 0

    def sampling_params(self, vocab_size: int, max_context: int) -> SamplingParams:
        if self.best_of not in (None, self.n or 1):
            expected = f"expected null or n ({self.n or 1}): all choices are returned"
            message = f"best_of: {expected}, got {self.best_of}"
            raise invalid(message, "best_of", code="unsupported_parameter")
        special: dict[str, Any] = {"logprobs": self.logprobs}
        if self.echo:
            special["prompt_logprobs"] = self.logprobs
        if self.prompt_only:
            special["max_tokens"] = 1
        return self._params(vocab_size, max_context, **special)


class Message(StrictModel):
    """Fields beyond these (name, tool_calls, reasoning_content) go to the template as they are."""

    model_config = ConfigDict(strict=True, extra="allow")
    role: Annotated[str, Field(min_length=1)]
    content: Content | None = None


class ChatRequest(GenerationFields):
    unsupported = OF_CHAT
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def sampling_params(self, vocab_size: int, max_context: int) -> SamplingParams:
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs needs logprobs to be true", "top_logprobs")
        # Chat has no default of 16 tokens: without a limit the answer runs to the context's end.
        limit = self.max_completion_tokens
        return self._params(
            vocab_size,
            max_context,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            max_tokens=self.max_tokens if limit is None else limit,
        )

    def _own_name(self, field: str) -> str:
        if field == "max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        return "top_logprobs" if field == "logprobs" else field


Body = TypeVar("Body", bound=GenerationFields)

# Of pydantic's errors: the value has the right type and is not one of those that are possible.
_IMPOSSIBLE = frozenset(
    ("less_than_equal", "greater_than_equal", "finite_number", "too_short", "string_too_short")
    + ("value_error",)
)


def parse_body(model: type[Body], raw: bytes) -> Body:
    """A validated body, or a 400 that names the field."""
    try:
        # Strictly UTF-8: given bytes, json would take UTF-16 and pass surrogates through.
        data = json.loads(raw.decode("utf-8-sig"))
        if b"\\u" in raw:  # an escaped lone surrogate is a str that no encoder takes
            json.dumps(data, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise invalid("the body has an unpaired surrogate escape", code="invalid_json") from None
    except (ValueError, RecursionError) as error:
        message = f"the body is not JSON: {str(error)[:200]}"
        raise invalid(message, code="invalid_json") from None
    if not isinstance(data, dict):
        raise invalid("the body should be a JSON object", code="invalid_type")
    refuse_unsupported(data, model.unsupported)
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _refusal(error) from None


def _refusal(error: ValidationError) -> ApiError:
    """Of the first fault: the field, what is expected, and what was given."""
    first = error.errors(include_url=False, include_context=False)[0]
    param, kind, value = _path(first["loc"]), first["type"], first["input"]
    if kind == "missing":
        return invalid(f"{param}: {first['msg']}", param, "missing")
    if kind == "extra_forbidden":
        known = ", ".join(PrefixCacheField.model_fields)  # the only model that forbids any
        message = f"{param}: is not known, expected one of {known}, got {shown(value)}"
        return invalid(message, param, "unknown_parameter")
    if kind == "model_type":  # pydantic names its own class
        return invalid(f"{param}: should be an object, got {shown(value)}", param, "invalid_type")
    fits = kind in _IMPOSSIBLE or (kind == "literal_error" and isinstance(value, str))
    code = "invalid_value" if fits else "invalid_type"
    return invalid(f"{param}: {first['msg']}, got {shown(value)}", param, code)


def leading_field(error: ValueError) -> str | None:
    """The field that a ValueError's message starts with, as the engine's messages do."""
    match = re.match(r"[a-z_]+(\.[a-z_]+|\[\d+\])*", str(error))
    return match.group() if match else None


def _path(loc: tuple[int | str, ...]) -> str:
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith("<"):
            path += f".{part}" if path else part
    return path
