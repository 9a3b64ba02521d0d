"""One scrape as a context: entered when the answer is there, left when its connection is free."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType

from conveyor.gateway.transport import Answer
from conveyor.ports.gateway import ScrapeRequest, Success

Opened = tuple[Answer, Success]


class Call(AbstractAsyncContextManager[Success]):
    """What `scrape` returns. `start` gives the answer and what it is worth, or raises
    ScrapeFailed with the answer already released."""

    __slots__ = ("_answer", "_request", "_start")

    def __init__(
        self, start: Callable[[ScrapeRequest], Awaitable[Opened]], request: ScrapeRequest
    ) -> None:
        self._start = start
        self._request = request
        self._answer: Answer | None = None

    async def __aenter__(self) -> Success:
        answer, success = await self._start(self._request)
        # A body that came whole has given its connection back already.
        if not isinstance(success.content, bytes):
            self._answer = answer
        return success

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._answer is not None:
            self._answer.release()
            self._answer = None
