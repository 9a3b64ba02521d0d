"""What an HTTP engine gives and how it fails: the words between the gateways and `engine`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from enum import StrEnum
from typing import Protocol


class Trouble(StrEnum):
    """Why an exchange gave no whole answer."""

    UNSENDABLE = "unsendable"
    REFUSED = "refused"
    UNREACHABLE = "unreachable"
    INTERRUPTED = "interrupted"
    TRUNCATED = "truncated"
    MALFORMED = "malformed"
    TIMEOUT = "timeout"


class TransportError(Exception):
    """No whole answer. Holds no URL, header or key: it may be logged."""

    def __init__(self, trouble: Trouble) -> None:
        super().__init__(trouble.value)
        self.trouble = trouble


class Headers(Protocol):
    """Header fields, looked up without regard to case."""

    def get(self, name: str, /, default: str) -> str:
        """The first field of that name."""
        ...

    def getall(self, name: str, /, default: list[str]) -> list[str]:
        """Every field of that name, in order."""
        ...


class Answer(Protocol):
    """An answer whose head has arrived; its body is read once, and is not decoded."""

    @property
    def status(self) -> int:
        """The HTTP status."""
        ...

    @property
    def headers(self) -> Headers:
        """The header fields."""
        ...

    async def read(self) -> bytes:
        """The whole body. Raises TransportError."""
        ...

    def pieces(self) -> AsyncIterator[bytes]:
        """The body as it arrives, in pieces of at most 256 KiB. Raises TransportError."""
        ...

    def release(self) -> None:
        """Give the connection back, or drop it where the body was not read to its end."""
        ...


Lookup = Callable[[str, int], Awaitable[list[str]]]
"""The IP addresses of a host name (and port), as text. Raises OSError where there are none."""


def content_length(headers: Headers) -> int | None:
    """The length that the head promises; None where it promises none."""
    text = headers.get("Content-Length", "")
    return int(text) if text.isascii() and text.isdecimal() else None
