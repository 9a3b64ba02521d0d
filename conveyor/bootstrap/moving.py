"""Wire a server whose clock is moved by hand: what is due next, and who moves it."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from conveyor.aio.resilience import log_and_continue
from conveyor.clock import FOLLOWED_FOR, ManualClock, SystemClock
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import Run, RunStatus
from conveyor.engine.worker import Worker
from conveyor.ports.clock import Clock
from conveyor.ports.idle import ClockControl, ClockState, Due, OpenWork
from conveyor.service.context import MovedTime
from conveyor.settings import Settings

if TYPE_CHECKING:
    from conveyor.dev.binding import DevBinding


AFTER_FAILURE = 1.0
"""Real seconds of rest after a move that failed, for a clock that moves by itself."""

_log = logging.getLogger("conveyor.dev")


class MovedServer:
    """A server on a manual clock: its parts, and who follows its runs."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.machine = SystemClock()
        self._followed: dict[str, float] = {}
        self._has_work: Callable[[str], Awaitable[bool]] = _never

    @property
    def work(self) -> OpenWork:
        """The counter of open work."""
        return self.clock.work

    def requests(self) -> MovedTime:
        """Return what requests need to know of the clock."""
        return MovedTime(self.machine, self.work, self.note_look)

    def watch(self, binding: DevBinding, worker: Callable[[], Worker], settings: Settings) -> None:
        """Have the clock stop where something is due in the store, in a queue, or in hand."""
        from conveyor.dev.sqlite.upcoming import KeptDays, SqliteUpcoming

        kept = KeptDays(
            settings.row_retention_days,
            settings.delivery_retention_days,
            settings.fire_retention_days,
        )
        upcoming = SqliteUpcoming(binding.store.database, kept)

        async def in_store() -> Sequence[Due]:
            return await upcoming.due(self.clock.now())

        async def in_hand() -> Sequence[Due]:
            now = self.clock.monotonic()
            moments = (
                (worker().next_beat(), "heartbeats of work in hand"),
                (worker().next_message(binding.queues.visible_at), "tasks"),
            )
            return [Due(at - now, what, True) for at, what in moments if at is not None]

        async def has_work(run_id: str) -> bool:
            return await binding.store.runs.dispatchable_run(run_id) is not None

        self.clock.watch(in_store)
        self.clock.watch(in_hand)
        self.follow(has_work)

    def follow(self, has_work: Callable[[str], Awaitable[bool]]) -> None:
        """Ask this function whether a run that is followed still has work."""
        self._has_work = has_work

    async def move_by_itself(self) -> None:
        """Move the clock whenever the server is idle and a run with work is followed, in the mode
        auto; until cancelled. A move that fails is logged."""
        while self.clock.mode == "auto":
            moved = await log_and_continue(_log, "the clock did not move on", self._move_on)
            if moved is None:
                await self.machine.sleep(AFTER_FAILURE)

    async def _move_on(self) -> bool:
        await self.clock.move_on(self._is_followed)
        return True

    async def end(self) -> None:
        """Let the clock run, as the server ends; until cancelled."""
        await self.clock.run_out()

    def note_look(self, run: Run) -> None:
        """Note that somebody looked at a run, and so waits for it if it has work."""
        if run.status is RunStatus.RUNNING and not run.paused:
            self._followed[run.run_id] = self.machine.monotonic()
        else:
            self._followed.pop(run.run_id, None)

    async def _is_followed(self) -> bool:
        """Tell whether somebody waits for a run that has work now."""
        now = self.machine.monotonic()
        for run_id, shown_at in list(self._followed.items()):
            if now - shown_at < FOLLOWED_FOR and await self._has_work(run_id):
                return True
            # It ended or was paused since: the next look tells.
            if self._followed.get(run_id) == shown_at:
                del self._followed[run_id]
        return False


async def _never(_: str) -> bool:
    return False


class ManualControl(ClockControl):
    """Moves a manual clock."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock

    async def state(self) -> ClockState:
        clock = self._clock
        due = await clock.next_due()
        kinds = sorted((kind, count) for kind, count in clock.work.kinds.items() if count)
        return ClockState(
            mode=clock.mode,
            now=clock.now(),
            next=None if due is None else Due(due.after, due.what, due.is_work, due.is_expiry),
            sleeps=clock.pending,
            looks=clock.looking,
            open=tuple(kinds),
            wakes=clock.wakes,
        )

    async def advance(self, seconds: float) -> None:
        await self._clock.advance(seconds)

    async def advance_to(self, instant: int) -> None:
        await self._clock.advance_to(instant)

    async def shift_wall(self, seconds: float) -> None:
        await self._clock.shift_wall(seconds)

    async def run_until_idle(self) -> None:
        await self._clock.run_until_idle()


class SystemControl(ClockControl):
    """Shows the system's clock, and refuses to move it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    async def state(self) -> ClockState:
        return ClockState(mode="system", now=self._clock.now())

    async def advance(self, seconds: float) -> None:
        raise _unmovable()

    async def advance_to(self, instant: int) -> None:
        raise _unmovable()

    async def shift_wall(self, seconds: float) -> None:
        raise _unmovable()

    async def run_until_idle(self) -> None:
        raise _unmovable()


def _unmovable() -> ConveyorError:
    text = "this server runs on the system's clock: start it with --clock manual"
    return ConveyorError(ErrorCode.INVALID_ARGUMENT, text)
