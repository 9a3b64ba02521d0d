"""The gateway port: one scrape of one URL."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol

import msgspec

from conveyor.domain.model import Problem, RunFailure, Spend, TaskBody, TaskFailure
from conveyor.ports.blobs import Content


class ScrapeRequest(msgspec.Struct, frozen=True):
    """What to scrape: merged params (task over job), the caller's key, bounds.

    `timeout` is in seconds, for the whole call; `max_bytes` bounds the decoded body.
    """

    url: str
    api_key: str
    method: str = "GET"
    body: TaskBody | None = None
    params: dict[str, str] = {}
    timeout: float = 180.0
    max_bytes: int = 52_428_800


class Success(msgspec.Struct, frozen=True):
    """A body to store: untouched bytes, transfer compression decoded once.

    While the content is read the gateway may still raise ScrapeFailed.
    """

    content: Content
    content_type: str
    spend: Spend = Spend()


class ScrapeFailed(Exception):
    """The scrape gave no body. One of three verdicts, told by which field is set.

    `retryable`: try again, after `retry_after` seconds at the earliest; `burns_attempt` is False
    for an HTTP gateway's 429, which slows the job and uses up no try. `account`: an account-level
    refusal ends the run. Neither: the task fails for good.
    `problem` never holds a key; `failure` is the reason in the roll-up.
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


class Gateway(Protocol):
    """Scrapes URLs. Safe for concurrent use; no URL breaks it."""

    def scrape(self, request: ScrapeRequest) -> AbstractAsyncContextManager[Success]:
        """Make one call; the connection is held while the context is open.

        Raises ScrapeFailed on entry, or while the content is read.
        """
        ...

    async def aclose(self) -> None:
        """Close connections. No scrape may follow."""
        ...
