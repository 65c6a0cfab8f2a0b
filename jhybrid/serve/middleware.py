"""What surrounds every route: the API key, and the last answer to unexpected errors."""

from __future__ import annotations

import hmac
import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jhybrid.serve.errors import internal, unauthorized
from jhybrid.serve.http_io import error_response

log = logging.getLogger(__name__)

OPEN_PATHS = ("/health", "/metrics")  # probes and scrapers carry no key


class ApiKeyMiddleware:
    """Refuses requests without the key, comparing in constant time."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._expected = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                await error_response(unauthorized())(scope, receive, send)
                return
        await self._app(scope, receive, send)


class UnexpectedErrorMiddleware:
    """A 500 that says nothing to the client and everything to the log.

    Starlette's own handler raises on after answering, whereupon the server cuts a connection
    that the client means to use again.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception:
            if started:
                raise  # a cut connection is the only way left to say that this went wrong
            log.exception("%s %s failed", scope["method"], scope["path"])
            await error_response(internal())(scope, receive, send)
