"""Errors as OpenAI's clients expect them: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import json
import math
from typing import Any

SHOWN_CHARACTERS = 80


class ApiError(Exception):
    """An error meant for the client; everything else becomes a 500 that says nothing."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        fields = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": fields}


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """400: the request itself is at fault; `param` is the field."""
    return ApiError(400, message, kind="invalid_request_error", param=param, code=code)


def shown(value: Any) -> str:
    """A value of a body as a message quotes it: in JSON, and not at any length."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def context_too_long(tokens: int, limit: int, param: str) -> ApiError:
    message = f"{param} has {tokens} tokens, which leaves no room in the context of {limit}"
    return invalid(message, param, code="context_length_exceeded")


def unauthorized() -> ApiError:
    return ApiError(
        401,
        "missing or wrong API key; send it as 'Authorization: Bearer KEY'",
        kind="authentication_error",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def model_not_found(name: str) -> ApiError:
    return ApiError(
        404,
        f"the model {name!r} is not served here",
        kind="invalid_request_error",
        param="model",
        code="model_not_found",
    )


def queue_full(message: str, retry_after: float) -> ApiError:
    headers = {"Retry-After": str(max(1, math.ceil(retry_after)))}
    return ApiError(
        429, message, kind="rate_limit_error", code="rate_limit_exceeded", headers=headers
    )


def unavailable(message: str) -> ApiError:
    return ApiError(503, message, kind="server_error", code="engine_unavailable")


def internal(message: str = "internal server error") -> ApiError:
    return ApiError(500, message, kind="server_error", code="internal_error")
