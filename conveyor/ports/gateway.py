"""The gateway port: one scrape of one URL."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from enum import StrEnum
from typing import Protocol

import msgspec

from conveyor.domain.model import (
    Problem,
    RunFailure,
    Spend,
    TaskBody,
    TaskFailure,
    WaitReason,
)
from conveyor.ports.blobs import Content


class ScrapeRequest(msgspec.Struct, frozen=True):
    """One call to make: the URL, merged params (a task's override its job's), key and bounds.

    `timeout` is in seconds, for the whole call; `max_bytes` bounds the decoded body. `order` is the
    place of the task in its run. `has_waited`: the task was put off before, after an attempt or
    without one. With `heeds_robots` nothing is requested that robots.txt does not allow. `guard` is
    called with the URL of each redirect before that is followed; it raises ScrapeFailed.
    """

    url: str
    api_key: str
    method: str = "GET"
    body: TaskBody | None = None
    params: dict[str, str] = {}
    timeout: float = 180.0
    max_bytes: int = 52_428_800
    order: int = 0
    has_waited: bool = False
    heeds_robots: bool = False
    guard: Callable[[str], Awaitable[object]] | None = None


class AnswerHeaders(Protocol):
    """The header fields of an answer."""

    def values(self) -> Iterable[str]:
        """Return the value of every field."""
        ...


class HostRefusal(msgspec.Struct, frozen=True):
    """The answer of a host (name and port) that takes no more calls for now: 429, or 503 with a
    valid Retry-After.

    `seconds` is that, bounded, None without one. With `is_private` the request bore a header of its
    caller, so that others may still be served.
    """

    host: str
    seconds: float | None = None
    is_private: bool = False


class HostDelay(msgspec.Struct, frozen=True):
    """The wish of a host (name and port) that the calls of one caller be `interval` seconds apart,
    for so many seconds from now on."""

    host: str
    interval: float
    seconds: float


class Success(msgspec.Struct, frozen=True):
    """The body of a successful scrape: untouched bytes, transfer compression decoded once.

    `sent` counts the requests that went out for it, those of redirects included. `status` and
    `headers` are those of the answer, if there was one; `refusal` is there if the caller takes a
    refusal for a result. Reading the content may still raise ScrapeFailed.
    """

    content: Content
    content_type: str
    spend: Spend = Spend()
    sent: int = 1
    status: int = 200
    headers: AnswerHeaders | None = None
    refusal: HostRefusal | None = None


class Shared(StrEnum):
    """Parts that many tasks share on the way to their targets, and none of them can mend."""

    GATEWAY = "gateway"
    RESOLVER = "resolver"
    NETWORK = "network"
    PROCESS = "file descriptors"
    """The descriptors, memory and threads of this process."""
    STORE = "result store"


class Absence(msgspec.Struct, frozen=True):
    """The sign that something shared is away: no exchange came about.

    Without `shared` it may as well be a trouble of the target alone.
    """

    shared: Shared | None = None


class ScrapeFailed(Exception):
    """A scrape without a body, with one of three verdicts.

    If `retryable` is set, the task is tried again, after `retry_after` seconds at the earliest;
    `burns_attempt` is False for an HTTP gateway's 429, which slows the job and uses up no try;
    `refusal` is there if the target's own host refused. If
    `account` is set, the gateway refused the account, which ends the run. Otherwise the task fails
    for good. `problem` never holds a key; `failure` is the reason in the roll-up; `sent` counts the
    requests that went out. `absence` is there if nobody gave a whole answer; a worker that finds
    something shared away sets `is_spared`, and the try is none of the task's. `waits_since` is when
    the trouble began, where it lasts; 0 means now. `headers` are those of the answer, if one came.
    """

    def __init__(
        self,
        problem: Problem,
        failure: TaskFailure,
        *,
        retryable: bool = False,
        retry_after: float = 0.0,
        burns_attempt: bool = True,
        account: RunFailure | None = None,
        spend: Spend | None = None,
    ) -> None:
        super().__init__(problem.code)
        self.problem = problem
        self.failure = failure
        self.retryable = retryable
        self.retry_after = retry_after
        self.burns_attempt = burns_attempt
        self.account = account
        self.spend = spend if spend is not None else Spend()
        self.sent = 1
        self.absence: Absence | None = None
        self.is_spared = False
        self.waits_since = 0
        self.headers: AnswerHeaders | None = None
        self.refusal: HostRefusal | None = None


class Postponed(ScrapeFailed):
    """A call that is not made yet, because its target or way is to be left alone for `retry_after`
    seconds.

    `waiting` says why; `delay` is there if the host has just asked for one. No attempt is used up,
    and the job does not slow down. `sent` counts the redirects that led here. A task that is
    postponed past its deadline fails with `problem`.
    """

    def __init__(
        self,
        problem: Problem,
        failure: TaskFailure,
        *,
        retry_after: float,
        waiting: WaitReason,
    ) -> None:
        super().__init__(
            problem, failure, retryable=True, retry_after=retry_after, burns_attempt=False
        )
        self.waiting = waiting
        self.delay: HostDelay | None = None
        self.sent = 0


class Gateway(Protocol):
    """A scraper of URLs, for workers. It is safe for concurrent use, and no URL breaks it."""

    def scrape(self, request: ScrapeRequest) -> AbstractAsyncContextManager[Success]:
        """Make one call, and hold its connection while the returned context is open.

        Raises ScrapeFailed on entry to the context, or while the content is read.
        """
        ...

    async def aclose(self) -> None:
        """Close all connections. No scrape may follow."""
        ...


class Robots(Protocol):
    """The rules of robots.txt for requests that heed it."""

    async def admit(self, request: ScrapeRequest) -> HostDelay | None:
        """Return once a request is known to be allowed, with the delay that its host asks for.
        Raises ScrapeFailed if it is not, or not now."""
        ...


class GatewayCall(msgspec.Struct, frozen=True):
    """A call that a gateway under rules has answered: by the rule of that place, counted from 0, or
    by none. The values of secrets, the API key among them, are digests; a long body is cut."""

    number: int
    at: str
    method: str
    url: str
    params: dict[str, str]
    headers: dict[str, str]
    body: str | None
    content_type: str | None
    api_key: str
    rule: int | None


class RuleCalls(msgspec.Struct, frozen=True):
    """A rule, and the number of calls that it has answered."""

    host: str
    path: str
    method: str
    calls: int


class GatewayCalls(msgspec.Struct, frozen=True):
    """The calls of a gateway under rules: how many there were in all, are in flight, and were at
    most, by rule and by host, and the last ones, each bounded."""

    total: int
    in_flight: int
    peak_in_flight: int
    rules: list[RuleCalls]
    hosts: dict[str, int]
    requests: list[GatewayCall]


class GatewayControl(Protocol):
    """Changes the rules of a gateway, and shows its calls."""

    def install(self, document: bytes, *, is_toml: bool) -> None:
        """Replace all rules by those of a document in TOML or JSON, for calls from now on; one
        whose id was there before goes on where it was, if its answers begin with the earlier ones.
        Raises ConveyorError(invalid_argument), and the rules before it stay."""
        ...

    def calls(self) -> GatewayCalls:
        """Return the calls since the start, or since they were forgotten."""
        ...

    def forget(self) -> None:
        """Forget the calls; each rule begins anew."""
        ...
