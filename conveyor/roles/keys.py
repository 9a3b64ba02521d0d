"""Keys of `conveyor-dev` on a terminal: each acts at once, on the server of the same process.

The terminal gives letters without waiting for the end of a line, and does not show them. It is as
before while the server is stopped or in the background, and at its end, however that comes but by
SIGKILL.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import termios
import webbrowser
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from conveyor.aio.resilience import log_and_continue
from conveyor.bootstrap import Planter, Runtime
from conveyor.domain.errors import ConveyorError
from conveyor.ports.clock import Clock

FAILED_CALLS = 10
"""Gateway calls that one press of f lets fail."""
_LOOK_AGAIN = 1.0
"""Seconds between two looks of a process in the background."""
_MOST = 64
_TEXT_BROWSERS = frozenset({"www-browser", "links", "elinks", "lynx", "w3m"})
"""Browsers that take the terminal itself."""
HELP = """\
o  open the dashboard in a browser
s  seed an empty server with the runs of the demo
p  pause the workers, or let them go on
f  let the next {calls} gateway calls fail
c  clear all jobs and results (asks first)
?  show these keys
q  quit"""

_log = logging.getLogger("conveyor.roles")

Say = Callable[[str], None]


def on_terminal() -> bool:
    """Tell whether somebody sits at a terminal: standard input and output both are one."""
    with suppress(OSError, ValueError):
        return sys.stdin.isatty() and sys.stdout.isatty()
    return False


def open_browser(address: str) -> None:
    """Open an address in a browser with a window of its own, if there is any."""
    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        return
    if getattr(browser, "name", "") not in _TEXT_BROWSERS:
        browser.open(address)


class Keyboard:
    """The terminal on standard input, as the keys need it; `say` prints a line on it, and `plant`
    makes the data of the demo.

    It is taken only while this process is in the foreground: to change it from the background
    would stop the process.
    """

    def __init__(self, say: Say, plant: Planter) -> None:
        self.say = say
        self.plant = plant
        self._descriptor = sys.stdin.fileno()
        self._before: list[Any] | None = None
        self._is_taken = self._has_ended = False

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Take the terminal, and give it back at the end, at every stop, and at SIGQUIT."""
        handlers = {
            signal.SIGTSTP: self._end_or_stop,
            signal.SIGQUIT: self._end_or_stop,
            signal.SIGCONT: self._go_on,
        }
        former = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            self.take()
            yield
        finally:
            self.end()
            for number, handler in former.items():
                signal.signal(number, handler)

    def take(self) -> None:
        """Have letters come at once and unseen, if this process is in the foreground."""
        if self._is_taken or self._has_ended or not self._is_in_front():
            return
        with suppress(termios.error):
            mode = termios.tcgetattr(self._descriptor)
            # In the background it may be that of a shell which edits its line.
            if self._before is None:
                self._before = termios.tcgetattr(self._descriptor)
            mode[3] &= ~(termios.ICANON | termios.ECHO)
            # A read never waits: another program may have read what was there.
            mode[6][termios.VMIN] = mode[6][termios.VTIME] = 0
            termios.tcsetattr(self._descriptor, termios.TCSANOW, mode)
            self._is_taken = True

    def give_back(self) -> None:
        """Have the terminal as it was."""
        if self._is_taken and self._before is not None and self._is_in_front():
            # Its other end may be gone.
            with suppress(termios.error):
                termios.tcsetattr(self._descriptor, termios.TCSANOW, self._before)
        self._is_taken = False

    def end(self) -> None:
        """Have the terminal as it was, for good."""
        self.give_back()
        self._has_ended = True

    async def read(self, clock: Clock) -> str:
        """Return what was pressed; nothing if it was for somebody else. Raises OSError once the
        terminal is gone."""
        if not self._is_in_front():
            self._is_taken = False
            await clock.sleep(_LOOK_AGAIN)
            return ""
        self.take()
        await anyio.wait_readable(self._descriptor)
        if not self._is_in_front():
            return ""
        pressed = os.read(self._descriptor, _MOST)
        if not pressed:
            await clock.sleep(_LOOK_AGAIN)
        return pressed.decode("utf-8", "replace")

    def drop_pressed(self) -> None:
        """Forget what was pressed and not read yet."""
        with suppress(termios.error):
            termios.tcflush(self._descriptor, termios.TCIFLUSH)

    def _is_in_front(self) -> bool:
        try:
            return os.tcgetpgrp(self._descriptor) == os.getpgrp()
        except OSError:
            return False

    def _end_or_stop(self, number: int, _frame: FrameType | None) -> None:
        """Do what the signal does by itself, with the terminal as it was."""
        self.give_back()
        ours = signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.signal(number, ours)
        self.take()

    def _go_on(self, _number: int, _frame: FrameType | None) -> None:
        # A stop that nobody can see, SIGSTOP, leaves the terminal to the shell as well.
        self._is_taken = False
        self.take()


class Keys:
    """The keys, over a running server. `address` is what a browser opens."""

    def __init__(self, runtime: Runtime, keyboard: Keyboard, clock: Clock, *, address: str) -> None:
        self._runtime = runtime
        self._keyboard = keyboard
        self._clock = clock
        self._address = address
        self._say = keyboard.say
        self._asks = self._is_seeding = False
        self._beside: TaskGroup | None = None
        self._actions: dict[str, Callable[[], Awaitable[None]]] = {
            "o": self._open,
            "s": self._seed,
            "p": self._pause,
            "f": self._fail,
            "c": self._ask,
            "?": self._help,
            "h": self._help,
            "q": self._quit,
        }

    async def serve(self) -> None:
        """Act on each key until the task is cancelled, or the terminal is gone."""
        async with anyio.create_task_group() as self._beside:
            await self._act()
            self._beside.cancel_scope.cancel()

    async def _act(self) -> None:
        while True:
            try:
                pressed = await self._keyboard.read(self._clock)
            except OSError:
                return
            for key in pressed:
                await self.press(key)
                if self._asks:
                    break  # the rest was pressed before the question

    async def press(self, key: str) -> None:
        """Act on a key; others are passed over."""
        if self._asks:
            self._asks = False
            action: Callable[[], Awaitable[None]] | None = self._clear
            if key not in ("y", "Y"):
                self._say("nothing was cleared")
                return
        else:
            action = self._actions.get(key.lower())
        if action is not None:
            await log_and_continue(_log, "a key did not do its work", action)

    async def _open(self) -> None:
        self._say(self._address)
        await anyio.to_thread.run_sync(open_browser, self._address, abandon_on_cancel=True)

    async def _seed(self) -> None:
        if self._beside is None or self._is_seeding:
            return
        self._is_seeding = True
        self._say("the demo is played, which takes a while")
        # Keys are read meanwhile.
        self._beside.start_soon(log_and_continue, _log, "nothing was seeded", self._fill)

    async def _fill(self) -> None:
        try:
            await self._runtime.fill(self._keyboard.plant)
        except ConveyorError as error:
            self._say(f"nothing was seeded: {error.detail}")
        else:
            self._say("seeded: its runs are those of the key that `conveyor` sends")
        finally:
            self._is_seeding = False

    async def _pause(self) -> None:
        pause = self._runtime.pause
        if pause.since is None:
            self._say("paused: no task starts; what is in work is brought to its end (p goes on)")
            pause.hear(self._clock.now())
        else:
            self._say("the workers go on")
            pause.hear(None)

    async def _fail(self) -> None:
        left = self._runtime.fail_next(FAILED_CALLS)
        self._say(f"the next {left} gateway calls fail (503)")

    async def _ask(self) -> None:
        # What was pasted with the key is no answer.
        self._keyboard.drop_pressed()
        self._asks = True
        self._say("remove all jobs, results, schedules and deliveries of this server? y/N")

    async def _clear(self) -> None:
        await self._runtime.empty()
        self._say("all is cleared")

    async def _help(self) -> None:
        for line in HELP.format(calls=FAILED_CALLS).splitlines():
            self._say(line)

    async def _quit(self) -> None:
        # The same end as that of Ctrl-C.
        os.kill(os.getpid(), signal.SIGINT)
