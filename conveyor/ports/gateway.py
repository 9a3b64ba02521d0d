"""The gateway port: one scrape of one URL."""

from __future__ import annotations

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

    `timeout` is in seconds, for the whole call; `max_bytes` bounds the decoded body. `has_waited`:
    the call was put off since the last attempt, and no limit on its host puts it off again.
    """

    url: str
    api_key: str
    method: str = "GET"
    body: TaskBody | None = None
    params: dict[str, str] = {}
    timeout: float = 180.0
    max_bytes: int = 52_428_800
    has_waited: bool = False


class Success(msgspec.Struct, frozen=True):
    """The body of a successful scrape: untouched bytes, transfer compression decoded once.

    `sent` counts the requests that went out for it, those of redirects included. Reading the
    content may still raise ScrapeFailed.
    """

    content: Content
    content_type: str
    spend: Spend = Spend()
    sent: int = 1


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
    `burns_attempt` is False for an HTTP gateway's 429, which slows the job and uses up no try. If
    `account` is set, the gateway refused the account, which ends the run. Otherwise the task fails
    for good. `problem` never holds a key; `failure` is the reason in the roll-up; `sent` counts the
    requests that went out. `absence` is there if nobody gave a whole answer; a worker that finds
    something shared away sets `is_spared`, and the try is none of the task's. `waits_since` is when
    the trouble began, where it lasts; 0 means now.
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


class Postponed(ScrapeFailed):
    """A call that is not made yet, because its target or way is to be left alone for `retry_after`
    seconds.

    `waiting` says why. No attempt is used up, and the job does not slow down. `sent` counts the
    redirects that led here. A task that is postponed past its deadline fails with `problem`.
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
