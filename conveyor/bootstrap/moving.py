"""Wire a server whose clock is moved by hand: what is due next, and who moves it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from conveyor.clock import FOLLOWED_FOR, ManualClock, SystemClock
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.engine.worker import Worker
from conveyor.ports.clock import Clock
from conveyor.ports.idle import ClockControl, ClockState, Due, OpenWork
from conveyor.service.context import MovedTime
from conveyor.settings import Settings

if TYPE_CHECKING:
    from conveyor.dev.binding import DevBinding


class MovedServer:
    """A server on a manual clock: its parts, and who follows its runs."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.machine = SystemClock()
        self._shown_at: float | None = None

    @property
    def work(self) -> OpenWork:
        """The counter of open work."""
        return self.clock.work

    def requests(self) -> MovedTime:
        """Return what requests need to know of the clock."""
        return MovedTime(self.machine, self.work, self._note_follower)

    def watch(self, binding: DevBinding, worker: Worker, settings: Settings) -> None:
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
                (worker.next_beat(), "heartbeats of work in hand"),
                (worker.next_message(binding.queues.visible_at), "tasks"),
            )
            return [Due(at - now, what, True) for at, what in moments if at is not None]

        self.clock.watch(in_store)
        self.clock.watch(in_hand)

    async def move_by_itself(self) -> None:
        """Move the clock whenever the server is idle, in the mode auto; until cancelled."""
        if self.clock.mode == "auto":
            await self.clock.move_by_itself(self._is_followed)

    async def end(self) -> None:
        """Let the clock run, as the server ends; until cancelled."""
        await self.clock.run_out()

    def _note_follower(self) -> None:
        self._shown_at = self.machine.monotonic()

    def _is_followed(self) -> bool:
        shown_at = self._shown_at
        return shown_at is not None and self.machine.monotonic() - shown_at < FOLLOWED_FOR


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
            next=None if due is None else Due(due.after, due.what, due.is_work),
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
