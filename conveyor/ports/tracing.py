"""The tracing port: spans of requests, attempts and messages, for those who collect traces.

A `Recording` is told what happened after it happened, with its own instants, so that work which is
not traced costs one look at its id. Times are in milliseconds since the epoch. Attributes are ids,
verdicts, sizes and hosts: never a URL, a param or a key.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Protocol
from zlib import crc32

TRACEPARENT: ContextVar[str | None] = ContextVar("conveyor_traceparent", default=None)
"""The W3C traceparent of the request or fire under way, for the run that it makes."""


def is_sampled(key: str, ratio: float) -> bool:
    """Tell whether a key is within a share of all keys, 0 to 1. It is so in every process, and
    within each larger share."""
    return crc32(key.encode()) < round(ratio * (1 << 32))


class Recording(Protocol):
    """One trace, until it ends. One that never ends is never sent."""

    @property
    def traceparent(self) -> str:
        """The W3C traceparent that names the trace and its first span."""
        ...

    def link(self, traceparent: str) -> None:
        """Link to the span that a traceparent names. Ignore a malformed one."""
        ...

    def part(self, name: str, started_at: int, ended_at: int) -> None:
        """Add a span within the first one."""
        ...

    def end(
        self, ended_at: int, attributes: Mapping[str, str | int], *, failed: bool = False
    ) -> None:
        """End the trace with the attributes of its first span; send it later."""
        ...


class Tracer(Protocol):
    """Makes recordings."""

    def begin(self, name: str, key: str, *, started_at: int) -> Recording | None:
        """Begin a trace, unless the `key` is not among those that are sampled. Which are follows
        from the key alone, so that all processes agree."""
        ...

    def begin_always(self, name: str, *, started_at: int) -> Recording | None:
        """Begin a trace of something rare, which is not sampled; None if nobody collects traces."""
        ...


class NoTracer:
    """Traces nothing."""

    def begin(self, name: str, key: str, *, started_at: int) -> Recording | None:
        """Return None."""
        return None

    def begin_always(self, name: str, *, started_at: int) -> Recording | None:
        """Return None."""
        return None


NO_TRACER = NoTracer()
