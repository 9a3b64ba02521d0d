"""What can go wrong between the command line and a server."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conveyor.client.wire import InvalidTaskReply


class ClientError(Exception):
    """A sentence for the person at the terminal; never holds a key."""


class ServerUnreachable(ClientError):
    """No connection, or one that broke before the answer."""


class ServerRefused(ClientError):
    """A problem document: the stable `code`, the HTTP status, and the tasks refused, if any."""

    def __init__(
        self,
        message: str,
        *,
        code: str,
        status: int,
        invalid_tasks: tuple[InvalidTaskReply, ...] = (),
    ) -> None:
        super().__init__(message)
        self.code = code
        self.status = status
        self.invalid_tasks = invalid_tasks


class InvalidTasks(ClientError):
    """Tasks that the server refused: one line each, naming where the task came from."""

    def __init__(self, message: str, lines: list[str]) -> None:
        super().__init__(message)
        self.lines = lines
