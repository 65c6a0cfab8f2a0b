"""Offline batches through the same engine: `LLM(model).generate(prompts, params)`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from ..config import require
from .build import create_engine
from .config import EngineConfig
from .engine import Engine
from .host_spans import host_span
from .request import (
    FinishReason,
    PrefixCacheOptions,
    PrefixCacheUsage,
    Request,
    RequestUpdate,
    SamplingParams,
    TokenLogprob,
)

Prompt = str | Sequence[int] | Mapping[str, Any]


@dataclass
class CompletionOutput:
    """One generated text."""

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclass
class RequestOutput:
    """All texts of one prompt. `prefix_cache` is that of the first."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: list[CompletionOutput]
    prefix_cache: PrefixCacheUsage | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None


class LLM:
    """A model for offline use. Flags are those of serve, with underscores.

    `model` is `demo`, `demo-kda`, `dummy:<preset>` or a checkpoint folder. Use as a context
    manager, or call `close()`, to free the device memory at a known time.
    """

    def __init__(self, model: str = "demo", *, warm_up: bool = True, **flags: Any) -> None:
        self._engine: Engine | None = create_engine(model, EngineConfig(**flags), warm_up=warm_up)
        self._count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop the engine and its device memory; afterwards every call is a RuntimeError."""
        self._engine = None

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("this LLM is closed")
        return self._engine

    def get_tokenizer(self) -> Any:
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prompt_token_ids: Sequence[Sequence[int]] | None = None,
        prefix_cache: PrefixCacheOptions | None = None,
    ) -> list[RequestOutput]:
        """Generate for every prompt: a string, token ids, or {"prompt_token_ids": ids}.

        One SamplingParams serves all prompts, or one each. Outputs are in the prompts' order.
        """
        given = prompts if prompt_token_ids is None else prompt_token_ids
        require(given is not None, "prompts", given, "prompts, or prompt_token_ids")
        items = _as_prompts(given)
        params = sampling_params if sampling_params is not None else SamplingParams()
        each = [params] * len(items) if isinstance(params, SamplingParams) else list(params)
        require(len(each) == len(items), "sampling_params", len(each), f"{len(items)} of them")
        finished = self.stream(items, each, prefix_cache=prefix_cache)
        return [output for _, output in sorted(finished, key=lambda pair: pair[0])]

    def stream(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Sequence[SamplingParams],
        *,
        prefix_cache: PrefixCacheOptions | None = None,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Generate for every prompt, and give (its number, its output) whenever one is done."""
        outputs, requests = {}, {}
        for number, (item, p) in enumerate(zip(prompts, sampling_params, strict=True)):
            output, parts = self._expand(item, p, prefix_cache or PrefixCacheOptions())
            outputs[output.request_id] = number
            requests.update(parts)
        for output in self._run(requests):
            yield outputs[output.request_id], output

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generate the next turn of one conversation, or of a list of them."""
        many = messages if messages and not isinstance(messages[0], Mapping) else [messages]
        prompts = [
            self.get_tokenizer().apply_chat_template(
                list(conversation),
                tokenize=True,
                return_dict=False,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                **(chat_template_kwargs or {}),
            )
            for conversation in many
        ]
        return self.generate(prompts, sampling_params)

    @host_span("read prompt")
    def _expand(
        self, prompt: Prompt, params: SamplingParams, cache: PrefixCacheOptions
    ) -> tuple[RequestOutput, dict[str, tuple[Request, RequestOutput, int]]]:
        """The output record of a prompt, and the `n` requests that fill it."""
        text = prompt if isinstance(prompt, str) else None
        if isinstance(prompt, Mapping):
            require("prompt_token_ids" in prompt, "prompt", prompt, "a prompt_token_ids entry")
            prompt = prompt["prompt_token_ids"]
        tokenizer = self.get_tokenizer()
        given: Any = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        ids = tuple(given.tolist() if isinstance(given, np.ndarray) else given)
        name = f"offline-{self._count}"
        self._count += 1
        output = RequestOutput(name, text, ids, [CompletionOutput(i) for i in range(params.n)])
        parts = {}
        for i in range(params.n):
            seed = None if params.seed is None else params.seed + i
            request = Request(
                f"{name}-{i}", ids, replace(params, n=1, seed=seed), cache, time.monotonic()
            )
            parts[request.request_id] = (request, output, i)
        return output, parts

    def _run(
        self, requests: dict[str, tuple[Request, RequestOutput, int]]
    ) -> Iterator[RequestOutput]:
        """Queue everything (as far as the queue goes) and step until all is finished.

        Gives an output when all of its texts are.
        """
        engine, todo = self.engine, list(requests.values())[::-1]
        try:
            while todo or engine.has_work():
                while todo and len(engine.scheduler.waiting) < engine.config.max_queue:
                    engine.add(todo.pop()[0])
                for update in engine.step():
                    _, output, index = requests[update.request_id]
                    _apply(update, output, output.outputs[index])
                    if all(part.finish_reason is not None for part in output.outputs):
                        yield output
        except BaseException:
            for request_id in requests:  # leave nothing running behind an error, Ctrl-C or break
                engine.abort(request_id)
            with suppress(Exception):  # of the same kind, perhaps: the first one is told
                while engine.has_work():
                    engine.step()
            raise


def _as_prompts(prompts: Any) -> list[Prompt]:
    single = isinstance(prompts, (str, Mapping)) or (
        len(prompts) > 0 and not isinstance(prompts[0], Iterable)
    )
    return [prompts] if single else list(prompts)


def _apply(update: RequestUpdate, output: RequestOutput, completion: CompletionOutput) -> None:
    completion.text += update.text
    completion.token_ids += update.token_ids
    if update.logprobs:
        completion.logprobs = (completion.logprobs or ()) + update.logprobs
    if completion.index == 0 and update.prefix_cache is not None:
        output.prefix_cache = update.prefix_cache
    if completion.index == 0 and update.prompt_logprobs is not None:
        output.prompt_logprobs = update.prompt_logprobs
    if update.finish_reason is not None:
        completion.finish_reason = update.finish_reason
        completion.stop_reason = update.stop_reason
