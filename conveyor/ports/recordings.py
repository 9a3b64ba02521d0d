"""The recordings port: exchanges of a gateway, kept to be answered from again.

Nothing that reaches a recording holds a secret of its request: the gateways that record redact
first.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from enum import StrEnum
from typing import NamedTuple, Protocol

import msgspec

from conveyor.domain.model import Problem, RunFailure, Spend, TaskFailure, WaitReason
from conveyor.ports.blobs import Content
from conveyor.ports.gateway import HostRefusal, Shared


class Verdict(StrEnum):
    """The outcome of one exchange."""

    OK = "ok"
    FAILED = "failed"
    POSTPONED = "postponed"
    """Not called yet: the host was to be left alone."""
    SECRET_IN_ANSWER = "secret_in_answer"
    """Withheld: the answer held something that was redacted from its request."""


class Asked(msgspec.Struct, frozen=True):
    """A request after redaction. `key` is a digest of all the rest but `order`, the place of the
    task in its run; `body` is a digest of what it posts, empty without."""

    key: str
    order: int
    method: str
    url: str
    params: dict[str, str]
    body: str = ""


class RecordedFailure(msgspec.Struct, frozen=True, omit_defaults=True):
    """The rest of a failure: see ScrapeFailed and Postponed. Without `is_absent` an answer came."""

    problem: Problem
    failure: TaskFailure
    retryable: bool = False
    retry_after: float = 0.0
    burns_attempt: bool = True
    account: RunFailure | None = None
    is_absent: bool = False
    shared: Shared | None = None
    waiting: WaitReason | None = None
    host: HostRefusal | None = None


class Exchange(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One request and what came of it. `status` is that of the answer, or of the problem; `body`
    is the digest of a result's bytes, `ms` the milliseconds that it took; `masked` names the parts
    (`url`, `params`, `posted`) in which something redacted stood beyond its own place."""

    key: str
    verdict: Verdict
    status: int
    content_type: str = ""
    spend: Spend = Spend()
    ms: int
    body: str = ""
    sent: int = 1
    order: int = 0
    method: str = "GET"
    url: str
    params: dict[str, str] = {}
    posted: str = ""
    masked: tuple[str, ...] = ()
    refusal: RecordedFailure | None = None


class Withheld(NamedTuple):
    """The number of answers that were not recorded, for what they held, and their hosts: the first
    of them."""

    answers: int
    hosts: tuple[str, ...]


class BodyDraft(Protocol):
    """A body that is being recorded. It is part of nothing until it is kept."""

    async def write(self, piece: bytes) -> None:
        """Add a piece."""
        ...

    async def keep(self) -> str:
        """Keep the body, once for all that are equal; return its digest."""
        ...

    async def drop(self) -> None:
        """Forget it. Does nothing if it was kept."""
        ...


class Recorder(Protocol):
    """Writes one recording. Each operation raises OSError if it cannot be written."""

    def draft(self) -> BodyDraft:
        """Begin a body."""
        ...

    async def append(self, exchange: Exchange, body: bytes | None = None) -> None:
        """Add an exchange, behind all others. A `body` that is given is kept, and its digest
        written with the exchange."""
        ...

    async def aclose(self, *, is_whole: bool) -> None:
        """End the recording. A new one that is not whole is never answered from; one that was
        added to holds what it held and what was added."""
        ...


class Recordings(Protocol):
    """Reads one recording, in the order in which the exchanges of each task were added."""

    async def following(self, key: str, order: int) -> Exchange | None:
        """Return the next exchange with this key of the task in this place of its run; after the
        last one, that one again; None for a key that is not recorded.

        A place that has none takes those of the first task that nobody has asked for.
        """
        ...

    async def alike(self, asked: Asked) -> str | None:
        """Return the key of an exchange that differs from a request at most where it is `masked`;
        None without any."""
        ...

    async def nearest(self, asked: Asked) -> Exchange | None:
        """Return an exchange of the same host that is most like a request; None without any."""
        ...

    def body(self, digest: str) -> AbstractAsyncContextManager[tuple[Content, int]]:
        """Open a recorded body: its content, a small one in one piece, and its size."""
        ...

    async def rewind(self) -> None:
        """Begin again with the first exchange of each task."""
        ...

    async def aclose(self) -> None:
        """Close it."""
        ...


class RecordingState(msgspec.Struct, frozen=True):
    """The directory that a server records into, or that it answers from; empty for neither. Of what
    it records, the answers that were `withheld`, and the `hosts` of the first of them."""

    record: str = ""
    replay: str = ""
    withheld: int = 0
    hosts: tuple[str, ...] = ()
    is_whole: bool = True


class RecordingControl(Protocol):
    """Begins and ends recordings of a server that runs."""

    def recording(self) -> RecordingState:
        """Return what is recorded or replayed now."""
        ...

    async def record(self, directory: str) -> None:
        """Record into a new directory from now on, and end what was recorded or replayed.

        Raises ConveyorError: invalid_argument for a directory that cannot be recorded into,
        conflict while calls of a recording are under way.
        """
        ...

    async def replay(self, directory: str, *, missing: str = "fail") -> None:
        """Answer from a recording from now on, and end what was recorded or replayed.

        Raises ConveyorError: invalid_argument for one that cannot be answered from, conflict while
        calls of a recording are under way.
        """
        ...

    async def end_recording(self) -> RecordingState:
        """Return to the gateway of the start, and say what has ended. Raises
        ConveyorError(conflict) while calls of a recording are under way."""
        ...
