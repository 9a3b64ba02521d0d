"""The callbacks port: telling a state machine that waits with a task token how a run ended."""

from __future__ import annotations

from typing import Protocol


class NobodyWaits(Exception):
    """The token is of nobody who waits: its task has timed out, was told before, or never was."""


class Callbacks(Protocol):
    """Callbacks by task token. A token is a secret: no error and no log names it.

    Each method raises NobodyWaits; ConveyorError(unavailable) where it may be well later.
    """

    async def send_heartbeat(self, task_token: str) -> None:
        """Say that the work goes on."""
        ...

    async def send_success(self, task_token: str, *, output: str) -> None:
        """Say that the work is done; `output` is a JSON document of at most 256 KiB."""
        ...

    async def send_failure(self, task_token: str, *, error: str, cause: str) -> None:
        """Say that the work will not be done; `error` has at most 256 characters, `cause` at most
        32,768."""
        ...
