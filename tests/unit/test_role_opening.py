"""A role that is stopped while it opens, or cannot be opened: no resource stays open, and it is
never reported ready."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import pytest

from conveyor.bootstrap.production import RoleRuntime
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.roles.production import RoleInfo, serve
from conveyor.settings import load
from conveyor.testing.clock import FakeClock


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Opening:
    """Opens a role once it `may`; counts what was `closed` again, and what was `cut_off`."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.begun = anyio.Event()
        self.may = anyio.Event()
        self.cut_off = 0
        self.closed = 0
        self._failure = failure

    async def __call__(self, *_: object, **__: object) -> RoleRuntime:
        self.begun.set()
        try:
            await self.may.wait()
        except anyio.get_cancelled_exc_class():
            self.cut_off += 1
            raise
        if self._failure is not None:
            raise self._failure
        parts: dict[str, Any] = dict.fromkeys(RoleRuntime.__slots__)
        return RoleRuntime(**{**parts, "aclose": self._close})

    async def _close(self) -> None:
        await anyio.lowlevel.checkpoint()
        self.closed += 1


async def served_by(opening: Opening, ready: list[RoleInfo], stop: anyio.Event) -> None:
    settings = load(
        {"CONVEYOR_METRICS_HOST": "127.0.0.1"}, production=True, role="worker", metrics_port=0
    )
    await serve(settings, on_ready=ready.append, stop=stop, clock=FakeClock(), opened=opening)


async def served(opening: Opening, *happens: anyio.Event, stop: anyio.Event) -> list[RoleInfo]:
    """Serve until it ends, and let `happens` happen all at once while it opens; what was ready."""
    ready: list[RoleInfo] = []

    async def then() -> None:
        await opening.begun.wait()
        for event in happens:
            event.set()

    async with anyio.create_task_group() as group:
        group.start_soon(then)
        with anyio.fail_after(60):
            await served_by(opening, ready, stop)
    return ready


async def test_opening_is_cut_off_by_a_stop() -> None:
    opening, stop = Opening(), anyio.Event()

    assert await served(opening, stop, stop=stop) == []
    assert (opening.cut_off, opening.closed) == (1, 0)


async def test_what_was_opened_when_the_stop_came_is_closed() -> None:
    opening, stop = Opening(), anyio.Event()

    assert await served(opening, opening.may, stop, stop=stop) == []
    assert (opening.cut_off, opening.closed) == (0, 1)


async def test_why_it_cannot_be_opened_is_raised_as_it_was() -> None:
    opening = Opening(ConveyorError(ErrorCode.CONFLICT, "others' terms"))
    ready: list[RoleInfo] = []
    opening.may.set()

    with pytest.raises(ConveyorError, match="others' terms"):
        await served_by(opening, ready, anyio.Event())
    assert ready == []
