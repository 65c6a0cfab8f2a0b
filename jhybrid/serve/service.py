"""What the generating routes do between a parsed body and a response."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from jhybrid.engine.detokenizer import TokenBytes
from jhybrid.engine.request import QueueFull, SamplingParams
from jhybrid.serve.async_engine import AsyncEngine, EngineUnavailable, Generation
from jhybrid.serve.chat import PromptEncoder
from jhybrid.serve.errors import ApiError, internal, model_not_found, queue_full, unavailable
from jhybrid.serve.generate import Job, check_token_ids, engine_refusal, fit_context
from jhybrid.serve.http_io import EventStream, dump_json, event, json_response, until_gone
from jhybrid.serve.protocol import ChatRequest, CompletionRequest, GenerationFields
from jhybrid.serve.responses import ChatShape, CompletionShape, Shape, envelope

log = logging.getLogger(__name__)


class Service:
    """Serves one model under one name."""

    def __init__(self, engine: AsyncEngine, model_name: str) -> None:
        self.engine = engine
        self.model_name = model_name
        self._encoder = PromptEncoder(engine.tokenizer)
        self._vocab = TokenBytes(engine.tokenizer)

    async def close(self) -> None:
        await self.engine.close()
        self._encoder.close()

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model_name:
            raise model_not_found(name)

    async def completion(self, body: CompletionRequest, http: HttpRequest) -> Response:
        self.check_model(body.model)
        params = body.sampling_params(self.engine.vocab_size, self.engine.max_context)
        prompts = await self._encoder.completion(body)
        nested = len(prompts) > 1 or (bool(body.prompt) and isinstance(body.prompt[0], list))
        names = [f"prompt[{i}]" if nested else "prompt" for i in range(len(prompts))]
        fitted = [self._fit(params, *pair) for pair in zip(prompts, names, strict=True)]
        job = Job("cmpl", prompts, fitted, body.cache_options(), prompt_only=body.prompt_only)
        echoes = self._echoes(body, prompts) if body.echo else None
        return await self._answer(job, CompletionShape(self._vocab, echoes, job), body, http)

    async def chat(self, body: ChatRequest, http: HttpRequest) -> Response:
        self.check_model(body.model)
        params = body.sampling_params(self.engine.vocab_size, self.engine.max_context)
        prompt = await self._encoder.chat(body)
        fitted = self._fit(params, prompt, "messages")
        job = Job("chatcmpl", [prompt], [fitted], body.cache_options())
        return await self._answer(job, ChatShape(self._vocab, job), body, http)

    def _fit(self, params: SamplingParams, prompt: list[int], name: str) -> SamplingParams:
        check_token_ids(prompt, self.engine.vocab_size, name)
        return fit_context(params, prompt, self.engine.max_context, name)

    def _echoes(self, body: CompletionRequest, prompts: list[list[int]]) -> list[str]:
        """The prompts as they were written, or as their tokens read."""
        written = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        if written and isinstance(written[0], str):
            return [str(text) for text in written]
        return [self._vocab.decode(prompt) for prompt in prompts]

    async def _answer(
        self, job: Job, shape: Shape, body: GenerationFields, http: HttpRequest
    ) -> Response:
        if not body.stream:
            answer = await until_gone(http.receive, self._collect(job, shape))
            return json_response(answer)
        generation = await self._submit(job)
        events = self._events(job, shape, generation, body.include_usage)
        return EventStream(events, on_close=generation.close)

    async def _submit(self, job: Job) -> Generation:
        try:
            return await self.engine.submit(job.requests)
        except QueueFull as error:
            if len(job.requests) > error.limit:  # waiting would not help
                text = f"n: {len(job.requests)} sequences, the queue takes {error.limit}"
                raise engine_refusal(ValueError(text)) from None
            raise queue_full(str(error), error.retry_after) from None
        except ValueError as error:
            raise engine_refusal(error) from None

    async def _collect(self, job: Job, shape: Shape) -> dict[str, Any]:
        generation = await self._submit(job)
        try:
            async for update in generation:
                job.take(update)
        finally:
            generation.close()
        choices = [shape.whole(choice) for choice in job.choices]
        return envelope(job, self.model_name, shape.object, choices) | {"usage": job.usage()}

    async def _events(
        self, job: Job, shape: Shape, generation: Generation, include_usage: bool
    ) -> AsyncGenerator[bytes, None]:
        def chunk(choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> bytes:
            body = envelope(job, self.model_name, shape.chunk_object, choices)
            return event(dump_json({**body, "usage": usage} if include_usage else body))

        try:
            async for update in generation:
                said = shape.chunk(*job.take(update))
                if said is not None:
                    yield chunk([said], None)
            if include_usage:
                yield chunk([], job.usage())
        except Exception as error:
            # The status line is out already, so the error travels as an event.
            yield event(dump_json(_as_api_error(error).body()))
        yield event(b"[DONE]")


def _as_api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineUnavailable):
        return unavailable(str(error))
    log.error("a stream failed", exc_info=error)
    return internal()
