"""The HTTP routes: OpenAI's, and health, metrics, server_info, flush_cache."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from jhybrid.engine.interface import EngineProtocol
from jhybrid.engine.metrics import CONTENT_TYPE
from jhybrid.serve.async_engine import AsyncEngine, EngineUnavailable
from jhybrid.serve.errors import ApiError, unavailable
from jhybrid.serve.http_io import ClientGone, error_response, json_response
from jhybrid.serve.middleware import ApiKeyMiddleware, UnexpectedErrorMiddleware
from jhybrid.serve.protocol import ChatRequest, CompletionRequest, parse_body
from jhybrid.serve.service import Service

MAX_BODY_BYTES = 64 * 2**20


def create_app(
    engine: EngineProtocol, *, served_model_name: str | None = None, api_key: str | None = None
) -> FastAPI:
    """The application; the engine runs on its own thread from start-up to shutdown."""
    name = served_model_name or engine.model_name
    created = int(time.time())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service = Service(AsyncEngine(engine), name)
        app.state.service = service
        yield
        await service.close()

    # No generated docs: their pages load scripts from elsewhere.
    app = FastAPI(lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None)
    _add_error_handlers(app)
    app.add_middleware(UnexpectedErrorMiddleware)
    if api_key is not None:
        app.add_middleware(ApiKeyMiddleware, api_key=api_key)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = parse_body(CompletionRequest, await _read_body(request))
        return await _service(request).completion(body, request)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = parse_body(ChatRequest, await _read_body(request))
        return await _service(request).chat(body, request)

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [model_card()]})

    @app.get("/v1/models/{model:path}")
    async def model(model: str, request: Request) -> Response:
        _service(request).check_model(model)
        return json_response(model_card())

    @app.get("/health")
    async def health(request: Request) -> Response:
        failure = _service(request).engine.failure
        if failure is not None:
            raise unavailable(failure)
        return json_response({"status": "ok"})

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        text = await _service(request).engine.call(lambda e: e.metrics().prometheus_text())
        return Response(text, media_type=CONTENT_TYPE)

    @app.get("/server_info")
    async def server_info(request: Request) -> Response:
        return json_response(await _service(request).engine.call(lambda e: e.info()))

    @app.post("/flush_cache")
    async def flush_cache(request: Request) -> Response:
        if not await _service(request).engine.call(lambda e: e.flush_cache()):
            message = "requests are running; the cache was not flushed"
            raise ApiError(409, message, kind="conflict_error", code="engine_busy")
        return json_response({"flushed": True})

    def model_card() -> dict[str, object]:
        card = {"id": name, "object": "model", "created": created, "owned_by": "jhybrid"}
        return {**card, "max_model_len": engine.max_context}

    return app


def _service(request: Request) -> Service:
    return request.app.state.service


async def _read_body(request: Request) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            message = f"the body is larger than {MAX_BODY_BYTES} bytes"
            raise ApiError(413, message, kind="invalid_request_error", code="body_too_large")
    return bytes(body)


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return error_response(error)

    @app.exception_handler(EngineUnavailable)
    async def engine_unavailable(request: Request, error: EngineUnavailable) -> Response:
        return error_response(unavailable(str(error)))

    @app.exception_handler(HTTPException)
    async def routing_error(request: Request, error: HTTPException) -> Response:
        status = error.status_code
        message = f"{request.method} {request.url.path}: {error.detail}"
        code = HTTPStatus(status).phrase.lower().replace(" ", "_")
        headers = dict(error.headers or {})
        return error_response(
            ApiError(status, message, kind="invalid_request_error", code=code, headers=headers)
        )

    @app.exception_handler(ClientGone)
    @app.exception_handler(ClientDisconnect)
    async def client_gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it
