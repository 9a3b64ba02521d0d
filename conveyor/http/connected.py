"""Long work for a client, given up where the client hangs up."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio
from starlette.requests import Request

from conveyor.http.body import ClientGone

T = TypeVar("T")


class WhileConnected:
    """Does work for as long as the client of a request is there. Its body must have been read."""

    def __init__(self, request: Request) -> None:
        self._request = request

    async def __call__(self, work: Callable[[], Awaitable[T]]) -> T:
        """What the work returns. Raises what it raises, and ClientGone where it was given up."""
        results: list[T] = []
        failures: list[Exception] = []
        async with anyio.create_task_group() as group:

            async def watch() -> None:
                while (await self._request.receive())["type"] != "http.disconnect":
                    pass
                group.cancel_scope.cancel()

            group.start_soon(watch)
            try:
                results.append(await work())
            except Exception as error:
                failures.append(error)
            group.cancel_scope.cancel()
        if results:
            return results[0]
        raise failures[0] if failures else ClientGone
