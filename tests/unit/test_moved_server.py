"""A server whose clock moves by itself: for whom it moves, and what does not end it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
import msgspec
import pytest

from conveyor.bootstrap import moving
from conveyor.bootstrap.moving import MovedServer
from conveyor.clock import ManualClock
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import Run, RunStats, RunStatus
from conveyor.ports.idle import Due
from tests.patient import SECONDS

START = 1_800_000_000_000


@pytest.fixture
def anyio_backend() -> str:
    """Run on asyncio's own loop, the only one on which such a clock runs."""
    return "asyncio"


def run(status: RunStatus = RunStatus.RUNNING, *, paused: bool = False) -> Run:
    return Run(
        run_id="R", job_id="J", run_sequence=1, status=status,
        stats=RunStats(total=1), paused=paused, created_at=START, updated_at=START,
    )  # fmt: skip


class Moving:
    """A server that moves by itself, with a sleeper due each minute; `with_work` has live runs."""

    def __init__(self) -> None:
        self.server = MovedServer(ManualClock(start=START, mode="auto"))
        self.with_work = {"R"}
        self.woken = anyio.Event()

        async def has_work(run_id: str) -> bool:
            return run_id in self.with_work

        self.server.follow(has_work)

    async def sleep(self) -> None:
        await self.server.clock.sleep(60.0)
        self.woken.set()

    @asynccontextmanager
    async def going(self) -> AsyncIterator[None]:
        async with anyio.create_task_group() as group:
            group.start_soon(self.sleep)
            await anyio.lowlevel.checkpoint()
            group.start_soon(self.server.move_by_itself)
            yield
            group.cancel_scope.cancel()

    async def is_moved(self) -> bool:
        """Tell whether one turn moves the clock."""
        before = self.server.clock.monotonic()
        await self.server.clock.move_on(self.server._is_followed)
        return self.server.clock.monotonic() > before


async def test_a_run_that_somebody_looked_at_moves_the_clock() -> None:
    moving = Moving()
    async with moving.going():
        moving.server.note_look(run())
        with anyio.fail_after(SECONDS):
            await moving.woken.wait()


@pytest.mark.parametrize(
    "shown",
    [run(RunStatus.COMPLETED), run(RunStatus.PENDING), run(paused=True)],
    ids=["ended", "without work", "paused"],
)
async def test_a_run_without_work_moves_nothing(shown: Run) -> None:
    moving = Moving()
    async with anyio.create_task_group() as group:
        group.start_soon(moving.sleep)
        await anyio.lowlevel.checkpoint()
        moving.server.note_look(run())
        moving.server.note_look(shown)
        assert not await moving.is_moved()
        group.cancel_scope.cancel()


async def test_the_end_of_a_run_ends_the_move_before_anybody_looks_again() -> None:
    moving = Moving()
    async with anyio.create_task_group() as group:
        group.start_soon(moving.sleep)
        await anyio.lowlevel.checkpoint()
        moving.server.note_look(run())
        moving.server.note_look(msgspec.structs.replace(run(), run_id="other"))
        moving.with_work.clear()
        assert not await moving.is_moved()
        moving.with_work.add("other")
        assert not await moving.is_moved()
        group.cancel_scope.cancel()


async def test_a_move_that_fails_is_followed_by_the_next(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(moving, "AFTER_FAILURE", 0.0)
    server = Moving()
    failures = [ConveyorError(ErrorCode.CONFLICT, "no rest")]
    failures.append(ConveyorError(ErrorCode.UNAVAILABLE, "no disk"))

    async def due() -> Sequence[Due]:
        if failures:
            raise failures.pop(0)
        return []

    server.server.clock.watch(due)
    async with server.going():
        with anyio.fail_after(SECONDS):
            server.server.note_look(run())
            await server.woken.wait()
    assert "no rest" in caplog.text
    assert "no disk" in caplog.text
