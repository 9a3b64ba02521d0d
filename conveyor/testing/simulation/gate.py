"""What holds a simulated process up: stopped, it does nothing while time goes on; killed, nothing
more."""

from __future__ import annotations

import anyio


class ProcessKilled(BaseException):
    """Raised wherever a killed process touches the outside, so that nothing of its shutdown code
    reaches it. Like a cancellation it is no Exception: nobody handles it by mistake."""


class Gate:
    """Passed at each entry to and each return from a port or a sleep.

    `halted`: paused or killed; only then need `passed` be awaited.
    """

    __slots__ = ("_resumed", "halted", "killed")

    def __init__(self) -> None:
        self.halted = False
        self.killed = False
        self._resumed = anyio.Event()

    async def passed(self) -> None:
        """Return once the process runs. Raises ProcessKilled."""
        while self.halted:
            if self.killed:
                raise ProcessKilled
            await self._resumed.wait()

    def check(self) -> None:
        """For calls that do not wait. Raises ProcessKilled."""
        if self.killed:
            raise ProcessKilled

    def pause(self) -> None:
        """As SIGSTOP."""
        self.halted = True

    def resume(self) -> None:
        """As SIGCONT; without effect on a killed process."""
        self.halted = self.killed
        self._wake()

    def kill(self) -> None:
        """As SIGKILL, which reaches a paused process too."""
        self.halted = self.killed = True
        self._wake()

    def _wake(self) -> None:
        resumed, self._resumed = self._resumed, anyio.Event()
        resumed.set()
