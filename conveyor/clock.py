"""The clocks: the machine's own, and one that is moved by hand. This is the only module that reads
time, randomness and ids.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import math
import os
import random
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence, Sized
from pathlib import Path
from typing import NamedTuple, Protocol

import anyio
import anyio.lowlevel
from ulid import ULID

from conveyor.domain.errors import ConveyorError, ErrorCode


class SystemClock:
    """Implements the clock port over the machine's clocks."""

    def __init__(self) -> None:
        self._random = random.SystemRandom()

    def now(self) -> int:
        """Return milliseconds since the epoch, UTC."""
        return time.time_ns() // 1_000_000

    # Not a method of its own: each task asks ten times.
    monotonic = staticmethod(time.monotonic)
    """Return seconds from an arbitrary origin; never goes back."""

    async def sleep(self, seconds: float) -> None:
        """Return after `seconds`."""
        await anyio.sleep(max(seconds, 0.0))

    def new_id(self) -> str:
        """Return a new ULID for the present instant."""
        return str(ULID())

    def random(self) -> float:
        """Return a number in [0, 1)."""
        return self._random.random()

    def token(self, length: int) -> bytes:
        """Return unpredictable bytes."""
        return os.urandom(length)


_NANOSECONDS = 1_000_000_000
_FOREVER = 1e9
_MAX_TURNS = 2_000


class _Timer:
    __slots__ = ("due", "fired", "live", "order")

    def __init__(self, due: int, order: int) -> None:
        self.due = due
        self.order = order
        self.fired = anyio.Event()
        self.live = True

    def __lt__(self, other: _Timer) -> bool:
        return (self.due, self.order) < (other.due, other.order)


class _Timers:
    """Sleepers, by the instant at which they are due."""

    def __init__(self) -> None:
        self.pending = 0
        self._heap: list[_Timer] = []

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, timer: _Timer) -> None:
        heapq.heappush(self._heap, timer)
        self.pending += 1

    def first(self) -> _Timer | None:
        while self._heap and not self._heap[0].live:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None

    def retire(self, timer: _Timer) -> None:
        timer.live = False
        self.pending -= 1
        if len(self._heap) > 2 * self.pending + 64:
            self._heap = [timer for timer in self._heap if timer.live]
            heapq.heapify(self._heap)

    async def wait(self, timer: _Timer) -> None:
        self.push(timer)
        try:
            await timer.fired.wait()
        finally:
            if timer.live:
                self.retire(timer)

    def fire(self, timer: _Timer) -> None:
        self.retire(timer)
        timer.fired.set()


class _SeededIds:
    """Random numbers by a seed, and ids from them: each is greater than the one before."""

    def __init__(self, seed: str | int) -> None:
        self._random = random.Random(seed)
        self.last = 0

    def random(self) -> float:
        return self._random.random()

    def token(self, length: int) -> bytes:
        return self._random.randbytes(length)

    def new_id(self, now: int) -> str:
        fresh = now << 80 | self._random.getrandbits(79)
        self.last = max(fresh, self.last + 1)
        return str(ULID.from_bytes(self.last.to_bytes(16, "big")))


class VirtualClock:
    """The clock port over virtual time, which moves only when it is advanced; random numbers and
    ids are by `seed`, which restarts give the same again.

    `start` is the first `now()` in milliseconds. Belongs to one event loop; no other thread may
    call it.
    """

    def __init__(self, *, start: int, seed: str | int = 0) -> None:
        self._start = start
        self._elapsed = 0
        self._shift = 0
        self._ids = _SeededIds(seed)
        self._timers = _Timers()
        self._order = 0

    @property
    def pending(self) -> int:
        """Return the number of sleeps that wait for time to move."""
        return self._timers.pending

    def now(self) -> int:
        """Return virtual milliseconds since the epoch."""
        return self._start + self._shift + self._elapsed // 1_000_000

    def monotonic(self) -> float:
        """Return virtual seconds since the clock was made."""
        return self._elapsed / _NANOSECONDS

    def random(self) -> float:
        """Return a number in [0, 1), by the seed."""
        return self._ids.random()

    def token(self, length: int) -> bytes:
        """Return unpredictable bytes, from the operating system."""
        return os.urandom(length)

    def new_id(self) -> str:
        """Return a ULID of virtual time and seeded randomness; each is greater than the one
        before."""
        return self._ids.new_id(self.now())

    def shift(self, seconds: float) -> None:
        """Set the wall clock forward or back, as an administrator would; monotonic time stays."""
        self._shift += round(seconds * 1_000)

    async def sleep(self, seconds: float) -> None:
        """Wait until time has been advanced by `seconds`."""
        await self._sleep(self._timers, seconds)

    async def advance(self, seconds: float) -> None:
        """Move time on, stopping at each due sleep and letting every task settle."""
        await self._advance_to(self._elapsed + math.ceil(seconds * _NANOSECONDS))

    async def advance_while(self, condition: Callable[[], bool], *, limit: float) -> None:
        """Move time on from sleep to sleep while the condition holds, `limit` seconds at most."""
        end = self._elapsed + math.ceil(limit * _NANOSECONDS)
        await self._settle()
        while condition() and self._elapsed < end:
            timer = self._timers.first()
            await self._advance_to(end if timer is None else min(timer.due, end))

    async def _sleep(self, timers: _Timers, seconds: float) -> None:
        if seconds <= 0:
            await anyio.lowlevel.checkpoint()
            return
        self._order += 1
        due = self._elapsed + math.ceil(min(seconds, _FOREVER) * _NANOSECONDS)
        await timers.wait(_Timer(due, self._order))

    async def _advance_to(self, target: int) -> None:
        await self._settle()
        while (timer := self._timers.first()) is not None and timer.due <= target:
            self._elapsed = max(self._elapsed, timer.due)
            self._timers.fire(timer)
            await self._settle()
        self._elapsed = max(self._elapsed, target)

    async def _settle(self) -> None:
        await all_blocked()


async def all_blocked(most: int = _MAX_TURNS) -> bool:
    """Let the other tasks run until each waits for something; return whether they do.

    anyio's own function sleeps a tenth of a real second if it finds a runnable task, so on asyncio
    this checks the loop itself. A task that never waits holds it up for a bounded number of turns.
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:  # trio
        await anyio.wait_all_tasks_blocked()
        return True
    ready: Sized | None = getattr(loop, "_ready", None)
    for _ in range(most):
        await asyncio.sleep(0)
        if not (_any_runnable() if ready is None else len(ready)):
            return True
    return False


def _any_runnable() -> bool:
    """Return whether some task can run, on a loop that hides its queue."""
    present = asyncio.current_task()
    for task in asyncio.all_tasks():
        waiter = getattr(task, "_fut_waiter", None)
        if task is not present and (waiter is None or waiter.done()):
            return True
    return False


REST_WITHIN = 60.0
"""Most real seconds that a move waits for open work to end."""
MOST_DAYS = 400
"""Days that one move may take."""
MOST_WAKES = 2_000_000
"""Sleepers that one move may wake."""
MOVE_WITHIN = 600.0
"""Real seconds that one move may take."""
LAST_INSTANT = 253_399_622_400_000
"""The latest instant, in milliseconds: 9999-12-01. What is counted from it can still be written."""
IDLE_FOR = 0.05
"""Real seconds without open work after which a clock that moves by itself moves on."""
FOLLOWED_FOR = 2.0
"""Real seconds after which it stops, unless somebody asks after a run that has work."""
SAVED_AHEAD = 60 * _NANOSECONDS
"""Nanoseconds by which a clock that was killed may go on later than it had come, where the length
of its move was not known."""
JOURNAL_LINES = 100_000
"""Lines of the journal that are kept."""
_MOST_QUIET_TURNS = 1_000
_APART = 1 << 40


class WorkCounter:
    """Counts open work by kind, and gives turns one at a time, each when the loop is quiet.

    Belongs to the event loop on which it is first used, which must be asyncio's own.
    """

    def __init__(self) -> None:
        self.count = 0
        self.entered = 0
        self.kinds: Counter[str] = Counter()
        self._ended = anyio.Event()
        self._line: deque[asyncio.Future[None]] = deque()
        self._is_taken = False
        self._is_looking = False
        self._looks = 0

    def enter(self, kind: str) -> None:
        """Count one more piece of work."""
        self.count += 1
        self.entered += 1
        self.kinds[kind] += 1

    def leave(self, kind: str) -> None:
        """Count one less."""
        self.count -= 1
        self.kinds[kind] -= 1
        if not self.count:
            self._ended.set()

    def is_open(self, kind: str) -> bool:
        """Tell whether any work of this kind is counted."""
        return self.kinds[kind] > 0

    async def take_turn(self, kind: str) -> None:
        """Wait for a turn, which is counted from now on."""
        self.enter(kind)
        place = asyncio.get_running_loop().create_future()
        self._line.append(place)
        self._look()
        try:
            await place
        except BaseException:
            if place.done() and not place.cancelled():
                self._is_taken = False
            self.leave(kind)
            self._look()
            raise

    def end_turn(self, kind: str) -> None:
        """End a turn, and look for the next."""
        self._is_taken = False
        self.leave(kind)
        self._look()

    async def wait(self, seconds: float) -> bool:
        """Wait until nothing is open, for some real seconds; return whether nothing is."""
        if self.count:
            self._ended = anyio.Event()
            with anyio.move_on_after(max(seconds, 0.0)):
                await self._ended.wait()
        return not self.count

    def _look(self) -> None:
        if self._line and not self._is_taken and not self._is_looking:
            self._is_looking, self._looks = True, 0
            asyncio.get_running_loop().call_soon(self._give_turn)

    def _give_turn(self) -> None:
        loop = asyncio.get_running_loop()
        if len(getattr(loop, "_ready", ())) and self._looks < _MOST_QUIET_TURNS:
            self._looks += 1
            loop.call_soon(self._give_turn)
            return
        self._is_looking = False
        while self._line:
            place = self._line.popleft()
            if not place.done():
                self._is_taken = True
                place.set_result(None)
                return


class DueItem(Protocol):
    """Something that is due, in the words of the idle port."""

    @property
    def after(self) -> float:
        """Seconds until it is due."""
        ...

    @property
    def what(self) -> str:
        """Its kind."""
        ...

    @property
    def is_work(self) -> bool:
        """False for what the calendar brings."""
        ...

    @property
    def is_expiry(self) -> bool:
        """True for the end of what is kept."""
        ...


Source = Callable[[], Awaitable[Sequence[DueItem]]]


class JournalLine(NamedTuple):
    """A line of a clock's journal: the instant in milliseconds, and what came about: a `move` to
    it, or a new `id`."""

    at: int
    kind: str
    what: str


class _Limit(NamedTuple):
    """The end of one move, in wakes and in real seconds."""

    wakes: int
    until: float


class _Moment(NamedTuple):
    """An instant to stop at, in elapsed nanoseconds; `is_look` if only a loop that looks wakes."""

    at: int
    is_look: bool


class ManualClock(VirtualClock):
    """The clock of a real server that is moved by hand.

    It stops at each instant at which a sleeper wakes or a source of `watch` has something due, and
    goes on once the loop is idle and no work is open. Those who sleep on `looks` are passed over
    while nothing is due: where the clock stops, each of them looks once. `mode` is manual or auto.
    The journal keeps moves and ids, the last JOURNAL_LINES of them.
    """

    def __init__(
        self,
        *,
        start: int | None = None,
        mode: str = "manual",
        rest_within: float = REST_WITHIN,
        move_within: float = MOVE_WITHIN,
    ) -> None:
        super().__init__(start=SystemClock().now() if start is None else start, seed="0/worker")
        self.mode = mode
        self.is_start_given = start is not None
        self.work = WorkCounter()
        self.wakes = 0
        self.journal: deque[JournalLine] = deque(maxlen=JOURNAL_LINES)
        self.looks = LookingClock(self)
        self.requests = RequestClock(self)
        self._looking = _Timers()
        self._sources: list[Source] = []
        self._moving = anyio.Lock()
        self._rest_within = rest_within
        self._move_within = move_within
        self._file: Path | None = None
        self._saved = 0
        self._boots = 0
        self._is_ending = False

    # -- the parts of the server --

    def watch(self, source: Source) -> None:
        """Stop where something of this source is due."""
        self._sources.append(source)

    def new_id(self) -> str:
        made = super().new_id()
        self.note("id", made)
        return made

    def note(self, kind: str, what: str) -> None:
        """Write a line of the journal."""
        self.journal.append(JournalLine(self.now(), kind, what))

    async def look_later(self, seconds: float) -> None:
        """Wait for `seconds` at least, to look whether there is anything to do."""
        await self._sleep(self._looking, seconds)

    # -- keeping --

    def keep_in(self, path: Path, *, newest: int = -1) -> None:
        """Go on from the instant and ids in a file, if it is there, and keep them in it; from the
        `newest` instant that is stored, if that is later.

        Raises ConveyorError(unavailable) for a damaged file, and on an event loop that hides what
        can run.
        """
        if not hasattr(asyncio.get_running_loop(), "_ready"):
            text = "a clock that is moved needs asyncio's own event loop"
            raise ConveyorError(ErrorCode.UNAVAILABLE, text)
        self._file = path
        try:
            self._start, last, self._boots = _read_kept(path)
            self._elapsed = self._shift = 0
        except FileNotFoundError:
            last = 0
        except (ValueError, KeyError, TypeError, OverflowError):
            raise ConveyorError(ErrorCode.UNAVAILABLE, "the file of its clock is damaged") from None
        if newest > self._start or (newest == self._start and not last):
            # Ids are of their instant: the next one is greater than all that may be stored.
            self._start = newest + 1
        # Each boot has numbers of its own: those of an earlier one may be stored.
        self._ids = _SeededIds(f"{self._boots}/worker")
        self.requests.ids = _SeededIds(f"{self._boots}/requests")
        # Apart, for where the wall clock is behind the last id: there each id is the one before and
        # one more.
        self._ids.last, self.requests.ids.last = last, last + _APART
        self.save()

    def save(self, *, ahead: int = 0) -> None:
        """Write the file: the present, or the instant so many nanoseconds ahead. No start may be
        earlier than what the store holds, also after a kill."""
        if self._file is None:
            return
        now = self._saved = self.now() + math.ceil(ahead / 1_000_000)
        last = max(self._ids.last, self.requests.ids.last)
        kept = {"now": now, "last_id": f"{last:x}"}
        aside = self._file.with_name(f"{self._file.name}.new")
        try:
            aside.write_text(json.dumps({**kept, "boots": self._boots}), "ascii")
            aside.replace(self._file)
        except OSError as error:
            text = f"the clock cannot be kept in its file: {error.strerror}"
            raise ConveyorError(ErrorCode.UNAVAILABLE, text) from None

    def _save_ahead(self, ahead: int) -> None:
        """Write the file before a step, if it is of an earlier instant; not at each step."""
        if self.now() + ahead // 1_000_000 > self._saved:
            self.save(ahead=ahead + SAVED_AHEAD)

    # -- moving --

    async def advance(self, seconds: float) -> None:
        if not 0 <= seconds <= MOST_DAYS * 86_400:
            text = f"advance must be 0 to {MOST_DAYS} days"
            raise ConveyorError(ErrorCode.INVALID_ARGUMENT, text)
        async with self._moving:
            if self.now() + seconds * 1_000 > LAST_INSTANT:
                raise _too_late()
            try:
                await self._advance_to(self._elapsed + math.ceil(seconds * _NANOSECONDS))
            finally:
                # The instant reached: a move that was refused is none after a kill, either.
                self.save()

    async def advance_to(self, instant: int) -> None:
        """Move on to an instant in milliseconds."""
        if instant < self.now():
            text = "set must not be in the past: shift sets the wall clock back"
            raise ConveyorError(ErrorCode.INVALID_ARGUMENT, text)
        seconds = (instant - self.now()) / 1_000
        if seconds > MOST_DAYS * 86_400:
            text = f"set must be at most {MOST_DAYS} days from now"
            raise ConveyorError(ErrorCode.INVALID_ARGUMENT, text)
        await self.advance(seconds)

    async def shift_wall(self, seconds: float) -> None:
        """Set the wall clock alone forward or back."""
        far = abs(seconds) > MOST_DAYS * 86_400
        if far or self.now() + seconds * 1_000 < 0:
            text = f"shift must be at most {MOST_DAYS} days, and not lead before 1970"
            raise ConveyorError(ErrorCode.INVALID_ARGUMENT, text)
        async with self._moving:
            if self.now() + seconds * 1_000 > LAST_INSTANT:
                raise _too_late()
            await self._settle()
            self.shift(seconds)
            self.save()
            self.note("shift", f"{seconds:g}")

    async def run_until_idle(self) -> None:
        """Move from instant to instant until no work is left: no sleeper, no task, no event. What
        the calendar brings is left to its time."""
        async with self._moving:
            limit = self._limit()
            end = self._elapsed + MOST_DAYS * 86_400 * _NANOSECONDS
            try:
                await self._settle()
                while (moment := await self._next_moment(_is_work)) is not None:
                    if moment.at > end:
                        raise await self._never_at_rest()
                    await self._check(limit)
                    self._save_ahead(moment.at - self._elapsed)
                    await self._step(moment)
                await self._catch_up()
            finally:
                self.save()

    async def move_on(self, is_followed: Callable[[], Awaitable[bool]]) -> None:
        """Move to the next instant due, but not to the end of what is kept, if nothing was open for
        IDLE_FOR and somebody follows."""
        entered = self.work.entered
        await anyio.sleep(IDLE_FOR)
        if self.work.count or self.work.entered != entered or not await is_followed():
            return
        async with self._moving:
            await self._settle()
            limit = self._limit()
            while (moment := await self._next_moment(_is_no_expiry)) is not None:
                await self._check(limit)
                if self.now() + (moment.at - self._elapsed) // 1_000_000 > LAST_INSTANT:
                    raise _too_late()
                self._save_ahead(moment.at - self._elapsed)
                await self._step(moment)
                if not moment.is_look:
                    break

    async def run_out(self) -> None:
        """Run beside the machine's clock from now on, as the server ends: what still sleeps ends in
        its time."""
        self._is_ending = True
        before = time.monotonic()
        while True:
            await anyio.sleep(0.01)
            target = self._elapsed + int((time.monotonic() - before) * _NANOSECONDS)
            before = time.monotonic()
            for timers in (self._timers, self._looking):
                while (timer := timers.first()) is not None and timer.due <= target:
                    timers.fire(timer)
            self._elapsed = target

    async def next_due(self) -> DueItem | None:
        """Return what is due next, of all sources."""
        items = [item for source in self._sources for item in await source()]
        return min(items, key=lambda item: item.after, default=None)

    @property
    def looking(self) -> int:
        """Return the number of loops that wait to look."""
        return self._looking.pending

    async def _advance_to(self, target: int) -> None:
        self.save(ahead=max(target - self._elapsed, 0))
        await self._settle()
        limit = self._limit()
        while (moment := await self._next_moment(_is_any)) is not None:
            if moment.at > target:
                break
            await self._check(limit)
            await self._step(moment)
        await self._check(limit)
        if target > self._elapsed:
            self._elapsed = target
            self.note("move", "end")
        await self._catch_up()

    def _limit(self) -> _Limit:
        return _Limit(self.wakes + MOST_WAKES, time.monotonic() + self._move_within)

    async def _check(self, limit: _Limit) -> None:
        """Refuse to move on as the server ends, and beyond the limit of a move."""
        if self._is_ending:
            raise _stopping()
        if self.wakes > limit.wakes or time.monotonic() > limit.until:
            raise await self._never_at_rest()

    async def _next_moment(self, is_wanted: Callable[[DueItem], bool]) -> _Moment | None:
        """Return the next instant to stop at: of a sleeper, of something due, or of a loop that
        looks while something is due or its time has passed."""
        due: int | None = None
        for source in self._sources:
            for item in await source():
                if is_wanted(item):
                    at = self._elapsed + math.ceil(item.after * _NANOSECONDS)
                    due = at if due is None else min(due, at)
        await self._settle()
        moments: list[_Moment] = []
        sleeper, look = self._timers.first(), self._looking.first()
        if sleeper is not None:
            moments.append(_Moment(max(sleeper.due, self._elapsed), is_look=False))
        if due is not None and due > self._elapsed:
            moments.append(_Moment(due, is_look=False))
        is_due = due is not None and due <= self._elapsed
        if look is not None and (is_due or look.due <= self._elapsed):
            moments.append(_Moment(max(look.due, self._elapsed), is_look=True))
        return min(moments, default=None)

    async def _step(self, moment: _Moment) -> None:
        """Move to an instant, and wake the first who is due there."""
        if moment.at > self._elapsed:
            self._elapsed = moment.at
            self.note("move", "look" if moment.is_look else "due")
        sleeper, look = self._timers.first(), self._looking.first()
        if look is not None and look.due <= self._elapsed and (sleeper is None or look < sleeper):
            await self._wake(self._looking, look)
        elif sleeper is not None and sleeper.due <= self._elapsed:
            await self._wake(self._timers, sleeper)

    async def _wake(self, timers: _Timers, timer: _Timer) -> None:
        self.wakes += 1
        timers.fire(timer)
        await self._settle()

    async def _catch_up(self) -> None:
        """Let each loop look once whose time has passed: what they report is of now."""
        latest = self._order
        while (look := self._looking.first()) is not None and look.due <= self._elapsed:
            if look.order > latest:
                break
            await self._wake(self._looking, look)

    async def _settle(self) -> None:
        """Wait until no task of the loop can run and no work is open."""
        until = time.monotonic() + self._rest_within
        loop = asyncio.get_running_loop()
        while True:
            # Not turn by turn while work is open: a turn waits until the loop is quiet.
            await self.work.wait(until - time.monotonic())
            await asyncio.sleep(0)
            if not self.work.count and not len(getattr(loop, "_ready", ())):
                return
            if self._is_ending:
                raise _stopping()
            if time.monotonic() >= until:
                raise self._busy()

    def _busy(self) -> ConveyorError:
        opened = ", ".join(
            f"{kind} ({count})" for kind, count in sorted(self.work.kinds.items()) if count
        )
        text = f"the clock does not come to rest: {opened or 'tasks of the server go on running'}"
        return ConveyorError(ErrorCode.CONFLICT, text)

    async def _never_at_rest(self) -> ConveyorError:
        due = await self.next_due()
        left = f"{self.pending} sleeps" if due is None or self.pending else due.what
        text = f"the clock does not come to rest: {left} after {self.monotonic():,.0f} s"
        return ConveyorError(ErrorCode.CONFLICT, text)


def _is_any(_: DueItem) -> bool:
    return True


def _is_work(item: DueItem) -> bool:
    return item.is_work


def _is_no_expiry(item: DueItem) -> bool:
    return not item.is_expiry


def _stopping() -> ConveyorError:
    return ConveyorError(ErrorCode.UNAVAILABLE, "the server is stopping")


def _too_late() -> ConveyorError:
    text = "the clock goes to 9999-12-01 at the latest"
    return ConveyorError(ErrorCode.INVALID_ARGUMENT, text)


def _read_kept(path: Path) -> tuple[int, int, int]:
    """Read the file of a clock: the present, the last id, and the number of this boot."""
    kept = json.loads(path.read_text("ascii"))
    now, last, boots = int(kept["now"]), int(kept["last_id"], 16), int(kept["boots"])
    if not (0 <= now <= LAST_INSTANT and 0 <= last < 1 << 128 and boots >= 0):
        raise ValueError(path)
    return now, last, boots + 1


class LookingClock:
    """A manual clock as those see it who only look: see there."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self.now = clock.now
        self.monotonic = clock.monotonic
        self.random = clock.random
        self.token = clock.token
        self.new_id = clock.new_id
        self.sleep = clock.look_later


class RequestClock:
    """A manual clock as requests see it: its instants and ids, the latter from a stream of their
    own, and real pauses, as a client waits for the answer."""

    def __init__(self, clock: ManualClock) -> None:
        self.ids = _SeededIds("0/requests")
        self._clock = clock
        self._system = SystemClock()
        self.now = clock.now
        self.token = clock.token
        self.sleep = self._system.sleep

    def monotonic(self) -> float:
        """Return seconds that pass with either clock: what is kept for some seconds lapses in a
        move."""
        return self._system.monotonic() + self._clock.monotonic()

    def random(self) -> float:
        """Return a number in [0, 1), by the seed."""
        return self.ids.random()

    def new_id(self) -> str:
        """Return a ULID of the clock's present."""
        made = self.ids.new_id(self._clock.now())
        self._clock.note("id", made)
        return made
