"""The engine on a thread of its own, and asyncio on the other side.

Only that thread touches the engine. Whatever others want from it is a command in an inbox,
executed between two steps; updates travel back to one asyncio queue per HTTP request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from jhybrid.engine.interface import EngineProtocol
from jhybrid.engine.request import Request, RequestUpdate

log = logging.getLogger(__name__)
T = TypeVar("T")

EngineCall = Callable[[EngineProtocol], Any]
Command = tuple[EngineCall, "Future[Any] | None"]
SHUTTING_DOWN = "the server is shutting down"


class EngineUnavailable(RuntimeError):
    """The engine has failed or is shutting down."""


class Generation:
    """The running sequences of one HTTP request; iterate to get their updates as they come."""

    def __init__(self, owner: AsyncEngine, requests: Sequence[Request]) -> None:
        self._owner = owner
        self._open = {request.request_id for request in requests}
        self._queue: asyncio.Queue[RequestUpdate | EngineUnavailable] = asyncio.Queue()

    @property
    def open_ids(self) -> frozenset[str]:
        return frozenset(self._open)

    def put(self, item: RequestUpdate | EngineUnavailable) -> None:
        self._queue.put_nowait(item)

    async def __aiter__(self) -> AsyncIterator[RequestUpdate]:
        """Ends when every sequence has finished; raises EngineUnavailable if the engine fails."""
        while self._open:
            item = await self._queue.get()
            if isinstance(item, EngineUnavailable):
                raise item
            if item.finish_reason is not None:
                self._open.discard(item.request_id)
            yield item

    def close(self) -> None:
        """Abort whatever has not finished; harmless when all has."""
        self._owner.release(self)
        self._open.clear()


class AsyncEngine:
    """Owns the engine thread. Create and use it on one event loop."""

    def __init__(self, engine: EngineProtocol) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._generations: dict[str, Generation] = {}  # by request id; event loop only
        self._inbox: deque[Command] = deque()
        self._wake = threading.Condition()
        self._closing = False  # drain, then stop
        self._stopped = False
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="jhybrid-engine", daemon=True)
        self._thread.start()

    # Constants of the engine, safe to read from anywhere.

    @property
    def tokenizer(self) -> Any:
        return self._engine.tokenizer

    @property
    def max_context(self) -> int:
        return self._engine.max_context

    @property
    def vocab_size(self) -> int:
        return self._engine.vocab_size

    @property
    def model_name(self) -> str:
        return self._engine.model_name

    @property
    def failure(self) -> str | None:
        """Why the engine is gone, or None while it lives."""
        return self._failure

    # The event loop's side.

    async def call(self, function: Callable[[EngineProtocol], T]) -> T:
        """Run `function` on the engine thread between two steps."""
        future: Future[T] = Future()
        self._post(function, future)
        return await asyncio.wrap_future(future)

    async def submit(self, requests: Sequence[Request]) -> Generation:
        """Add all or none. Raises what engine.add raises, or EngineUnavailable."""
        if self._closing:
            raise EngineUnavailable(SHUTTING_DOWN)
        generation = Generation(self, requests)
        # Registered before the engine knows them: an update may come before this task goes on.
        self._generations.update({request.request_id: generation for request in requests})
        try:
            await self.call(lambda engine: _add_all(engine, requests))
        except BaseException:
            # Cancelled while adding counts too: the engine may have them by now.
            generation.close()
            raise
        return generation

    def release(self, generation: Generation) -> None:
        """Forget a generation and abort what it still has in the engine."""
        abandoned = [i for i in generation.open_ids if self._generations.pop(i, None)]
        if abandoned:
            with contextlib.suppress(EngineUnavailable):  # nothing left that could hold anything
                self._post(lambda engine: _abort_all(engine, abandoned), None)

    async def close(self) -> None:
        """Take nothing new, let what runs finish, and stop the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    def _post(self, function: EngineCall, future: Future[Any] | None) -> None:
        with self._wake:
            if self._failure is not None:
                raise EngineUnavailable(self._failure)
            if self._stopped:
                raise EngineUnavailable(SHUTTING_DOWN)
            self._inbox.append((function, future))
            self._wake.notify()

    def _deliver(self, updates: list[RequestUpdate]) -> None:
        for update in updates:
            # Updates of aborted requests may still be under way: nobody waits for them.
            generation = self._generations.get(update.request_id)
            if generation is not None:
                generation.put(update)
                if update.finish_reason is not None:
                    del self._generations[update.request_id]

    def _deliver_failure(self, message: str) -> None:
        for generation in set(self._generations.values()):
            generation.put(EngineUnavailable(message))
        self._generations.clear()

    # The engine thread's side.

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                for function, future in self._take_commands():
                    self._execute(function, future)
                if self._engine.has_work():
                    updates = self._engine.step()
                    if updates:
                        self._loop.call_soon_threadsafe(self._deliver, updates)
        except BaseException as error:
            log.exception("the engine has failed")
            self._fail(f"the engine has failed ({type(error).__name__})")

    def _wait_for_work(self) -> bool:
        """Sleep until there is a command or a step to run; False once closed and drained."""
        with self._wake:
            while not self._inbox and not self._engine.has_work():
                if self._closing:
                    self._stopped = True
                    return False
                self._wake.wait()
            return True

    def _take_commands(self) -> list[Command]:
        with self._wake:
            commands = list(self._inbox)
            self._inbox.clear()
            return commands

    def _execute(self, function: EngineCall, future: Future[Any] | None) -> None:
        if future is None:
            function(self._engine)  # nobody to tell: an exception is the engine's failure
        elif future.set_running_or_notify_cancel():
            try:
                future.set_result(function(self._engine))
            except Exception as error:
                future.set_exception(error)

    def _fail(self, message: str) -> None:
        with self._wake:
            self._failure = message
        for _, future in self._take_commands():
            if future is not None and future.set_running_or_notify_cancel():
                future.set_exception(EngineUnavailable(message))
        with contextlib.suppress(RuntimeError):  # the loop is gone, and with it every client
            self._loop.call_soon_threadsafe(self._deliver_failure, message)


def _add_all(engine: EngineProtocol, requests: Sequence[Request]) -> None:
    for done, request in enumerate(requests):
        try:
            engine.add(request)
        except BaseException:
            _abort_all(engine, [earlier.request_id for earlier in requests[:done]])
            raise


def _abort_all(engine: EngineProtocol, request_ids: Sequence[str]) -> None:
    for request_id in request_ids:
        engine.abort(request_id)
