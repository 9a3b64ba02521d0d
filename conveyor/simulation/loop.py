"""Runs a coroutine in virtual time: nothing waits, the clock jumps to the next timer.

On asyncio this is an event loop of its own, on trio its mock clock. The code in it must consist of
coroutines only: every timer would overtake a thread or a socket.
"""

from __future__ import annotations

import asyncio
import heapq
import importlib
import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

import anyio

from conveyor.domain.text_rules import pip_install

T = TypeVar("T")

BACKENDS = ("asyncio", "trio")
_PRIVATE = ("_ready", "_scheduled", "_timer_cancelled_count", "_stopping")
_MANY_TIMERS = 100


class Deadlock(RuntimeError):
    """Every coroutine waits for another one: no timer is left to wake any."""


@dataclass(frozen=True, slots=True)
class VirtualTime:
    """The simulation's interface to its loop: virtual seconds from 0, and sleep."""

    seconds: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]]


def run(main: Callable[[VirtualTime], Awaitable[T]], *, backend: str, seed: int = 0) -> T:
    """Run `main` to its end in virtual time; the same seed gives the same order of events.

    `backend` is one of BACKENDS. Raises RuntimeError where trio is requested and not installed, and
    Deadlock.
    """
    if backend == "trio":
        return _run_on_trio(main, seed)
    if backend != "asyncio":
        raise ValueError(f"no such backend: {backend}")

    async def on_asyncio() -> T:
        return await main(virtual_time())

    return anyio.run(on_asyncio, backend_options={"loop_factory": VirtualLoop})


def virtual_time() -> VirtualTime:
    """Return the time of the running loop: a VirtualLoop, or trio's with its mock clock."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        trio: Any = importlib.import_module("trio")
        return VirtualTime(trio.current_time, trio.sleep)
    if not isinstance(loop, VirtualLoop):
        raise RuntimeError("this event loop runs in real time")
    return VirtualTime(loop.time, loop.sleep)


class _NumberedTask(asyncio.Task[Any]):
    """A task that knows how many were made before it, and informs its loop when it is cancelled."""

    number: int
    home: VirtualLoop

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel, and have the loop sort the wake-ups."""
        self.home.reorders = True
        return super().cancel(msg)


class VirtualLoop(asyncio.BaseEventLoop):
    """An asyncio event loop whose time jumps to the next timer when nothing is ready.

    It replaces the loop's private `_run_once`; a release of Python without the names used here is
    refused. Cancelled tasks set `reorders`.
    """

    # The names of BaseEventLoop that are used here. Handles have private ones too.
    _ready: deque[Any]
    _scheduled: list[Any]
    _timer_cancelled_count: int
    _stopping: bool

    def __init__(self) -> None:
        super().__init__()
        missing = [name for name in _PRIVATE if not hasattr(self, name)]
        if missing or not hasattr(asyncio.BaseEventLoop, "_run_once"):
            self.close()
            raise RuntimeError(f"this Python's event loop has no {', '.join(missing)}")
        self._seconds = 0.0
        self._numbers = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self.reorders = False
        self.set_task_factory(_numbered)

    def time(self) -> float:
        """Return virtual seconds since the loop was made."""
        return self._seconds

    def sleep(self, seconds: float) -> Awaitable[None]:
        """Sleep as asyncio does, for a third of the cost."""
        if seconds <= 0:
            return asyncio.sleep(0)  # noqa: TID251  (a turn of the loop, no time)
        future: asyncio.Future[None] = asyncio.Future(loop=self)
        entry = (self._seconds + seconds, next(self._numbers), future)
        heapq.heappush(self._sleepers, entry)
        return future

    def next_number(self) -> int:
        """Return the number of the next task."""
        return next(self._numbers)

    def _write_to_self(self) -> None:
        """Do nothing: no selector sleeps that would have to be woken."""

    def _run_once(self) -> None:
        """Run turns until the loop is stopped: the body of the loop's own `run_forever`."""
        ready = self._ready
        while True:
            if not ready and not self._stopping:
                self._jump()
            if self._scheduled and self._scheduled[0]._when <= self._seconds:
                self._bring_timers()
            if self.reorders:
                self._sort_cancelled()
            for _ in range(len(ready)):
                handle = ready.popleft()
                if not handle._cancelled:
                    handle._run()
            if self._stopping:
                return

    def _jump(self) -> None:
        """With nothing ready, move time on to the next timer and wake the sleepers due then.

        Moments are compared exactly: a tolerance would vanish in the rounding of large times.
        """
        timers, sleepers = self._scheduled, self._sleepers
        while timers and timers[0]._cancelled:
            self._timer_cancelled_count -= 1
            heapq.heappop(timers)._scheduled = False
        while sleepers and sleepers[0][2].done():
            heapq.heappop(sleepers)
        if not timers and not sleepers:
            raise Deadlock("every coroutine waits, and no timer is left to wake one")
        moment = sleepers[0][0] if sleepers else timers[0]._when
        if timers and timers[0]._when < moment:
            moment = timers[0]._when
        if moment > self._seconds:
            self._seconds = moment
        while sleepers and sleepers[0][0] <= moment:
            future = heapq.heappop(sleepers)[2]
            if not future.done():
                future.set_result(None)

    def _bring_timers(self) -> None:
        timers = self._scheduled
        if len(timers) > _MANY_TIMERS and self._timer_cancelled_count > len(timers) // 2:
            timers = self._drop_cancelled()
        while timers and timers[0]._when <= self._seconds:
            handle = heapq.heappop(timers)
            handle._scheduled = False
            if handle._cancelled:
                self._timer_cancelled_count -= 1
            else:
                self._ready.append(handle)

    def _drop_cancelled(self) -> list[Any]:
        kept = []
        for handle in self._scheduled:
            if handle._cancelled:
                handle._scheduled = False
            else:
                kept.append(handle)
        heapq.heapify(kept)
        self._scheduled = kept
        self._timer_cancelled_count = 0
        return kept

    def _sort_cancelled(self) -> None:
        """Wake cancelled tasks in the order of their creation.

        Cancel scopes keep their tasks in sets, whose order differs from process to process.
        """
        self.reorders = False
        handles = list(self._ready)
        woken = [
            (task.number, place)
            for place, handle in enumerate(handles)
            if isinstance(task := getattr(handle._callback, "__self__", None), _NumberedTask)
            and task.cancelling()
        ]
        places = sorted(place for _, place in woken)
        for place, (_, origin) in zip(places, sorted(woken), strict=True):
            self._ready[place] = handles[origin]


def _numbered(
    loop: asyncio.AbstractEventLoop,
    coro: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
    **options: Any,
) -> _NumberedTask:
    assert isinstance(loop, VirtualLoop)
    task = _NumberedTask(coro, loop=loop, **options)
    task.number = loop.next_number()
    task.home = loop
    return task


def _run_on_trio(main: Callable[[VirtualTime], Awaitable[T]], seed: int) -> T:
    try:
        importlib.import_module("trio")
        testing: Any = importlib.import_module("trio.testing")
        scheduler = importlib.import_module("trio._core._run")
    except ImportError:
        raise RuntimeError(f"the trio backend needs trio: {pip_install('trio')}") from None

    async def on_trio() -> T:
        return await main(virtual_time())

    clock = testing.MockClock(autojump_threshold=0)
    with _in_order(scheduler, seed):
        try:
            return anyio.run(on_trio, backend="trio", backend_options={"clock": clock})
        except BaseExceptionGroup as group:
            if group.subgroup(KeyboardInterrupt) is not None:
                raise KeyboardInterrupt from None
            raise


@contextmanager
def _in_order(scheduler: ModuleType, seed: int) -> Iterator[None]:
    """Let trio shuffle its tasks by a seed instead of by chance."""
    for name in ("_ALLOW_DETERMINISTIC_SCHEDULING", "_r"):
        if not hasattr(scheduler, name):
            raise RuntimeError(f"this release of trio has no {name}")
    module: Any = scheduler
    allowed, state = module._ALLOW_DETERMINISTIC_SCHEDULING, module._r.getstate()
    module._ALLOW_DETERMINISTIC_SCHEDULING = True
    module._r.seed(seed)
    try:
        yield
    finally:
        module._ALLOW_DETERMINISTIC_SCHEDULING = allowed
        module._r.setstate(state)
