"""The blobs port: bodies by key. Keys are made of ids, never of URLs or anything a caller chose."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Protocol

from conveyor.domain.errors import ConveyorError, ErrorCode

Content = bytes | AsyncIterator[bytes]
"""A body in one piece, or in pieces as it arrives."""


class BodyRefused(ConveyorError):
    """The store will not keep this very body, while it would keep others: it arrived damaged, or is
    larger than the store takes."""

    def __init__(self, reason: str) -> None:
        super().__init__(ErrorCode.UNAVAILABLE, "what was sent could not be kept", retry_after=5)
        self.args = (reason,)


class Blobs(Protocol):
    """Immutable byte strings."""

    async def put(self, key: str, content: Content) -> int:
        """Store a body under a key; the number of bytes. Readers see all of it or nothing.

        Whatever the iterator raises is raised again, and nothing is stored. Raises BodyRefused;
        ConveyorError(unavailable) where the store is away, or set up so that it keeps none.
        """
        ...

    async def open(self, key: str) -> AsyncIterator[bytes] | None:
        """The body in pieces of at most 256 KiB; None where there is none."""
        ...

    async def delete(self, key: str) -> None:
        """Remove one body; without effect where there is none."""
        ...

    async def delete_prefix(self, prefix: str, *, limit: int | None = None) -> int:
        """Remove the bodies whose keys start with `prefix` (which ends in "/"), at most `limit` of
        them; how many went. Fewer than `limit` tells that none was left."""
        ...

    async def size(self, key: str) -> int | None:
        """How many bytes a body has; None where there is none."""
        ...

    async def upload_link(self, key: str, *, content_type: str, seconds: int) -> str | None:
        """A link by which whoever holds it puts one body, sent as that Content-Type and no other,
        for so many seconds; again and again, the last one counts.

        None: this store has no links of its own, or none now that would last so long; it takes
        this body through the API.
        """
        ...

    async def download_link(self, key: str, *, seconds: int, file_name: str) -> str | None:
        """A link by which whoever holds it gets one body, for so many seconds, as an attachment of
        that name. None: this store has no links of its own, or none now.

        A link may be made for a shorter time, which it tells, where the store can give none that
        lasts so long: it is to be used now.
        """
        ...


_NAME = r"(?!\.\.?(?:/|\Z))[A-Za-z0-9._-]+"
_KEY = re.compile(rf"(?!tmp(?:/|\Z)){_NAME}(?:/{_NAME})*")


def checked_key(key: str) -> str:
    """The key itself. Raises ValueError for a text that is none.

    "tmp/" is left to the stores, for what is not whole yet.
    """
    if _KEY.fullmatch(key) is None:
        raise ValueError("not a blob key")
    return key


def checked_prefix(prefix: str) -> str:
    """The prefix itself. Raises ValueError for a text that is none: a key, and then a slash."""
    if not prefix.endswith("/"):
        raise ValueError("a prefix ends in a slash")
    checked_key(prefix[:-1])
    return prefix


def run_prefix(job_id: str, run_id: str, lifecycle_days: int) -> str:
    """The prefix that holds every body of a run, under its lifecycle class."""
    return f"results/{lifecycle_days}/{job_id}/{run_id}/"


def result_key(
    job_id: str, run_id: str, task_id: str, claim_number: int, lifecycle_days: int
) -> str:
    """The key of one claim's body: two claims of a task never write to the same key."""
    prefix = run_prefix(job_id, run_id, lifecycle_days)
    return f"{prefix}{task_id[:5]}/{task_id}.{claim_number}"


LIFECYCLE_DAYS = (30, 90, 400)
PASSING_DAYS = 2
"""Days for which a store keeps uploaded files and exports at the least; no slot and no export of a
fleet lives longer."""


def lifecycle_class(result_ttl_days: int) -> int:
    """The smallest lifecycle class, in days, that outlives the results of a job."""
    return next(days for days in LIFECYCLE_DAYS if result_ttl_days <= days)


def staged_prefix(job_id: str, run_id: str) -> str:
    """The prefix of the task list of a large run, while it waits to be written."""
    return f"staged/{job_id}/{run_id}/"


def staged_key(job_id: str, run_id: str, first_index: int) -> str:
    """The key of one chunk of a staged list, named by the index of its first task."""
    return f"{staged_prefix(job_id, run_id)}{first_index:011}"


def input_key(input_id: str) -> str:
    """The key of an uploaded file of tasks."""
    return f"inputs/{input_id}"


def export_key(job_id: str, run_id: str, export_id: str) -> str:
    """The key of a finished export."""
    return f"{export_prefix(job_id, run_id)}{export_id}"


def export_prefix(job_id: str, run_id: str) -> str:
    """The prefix that holds every export of a run."""
    return f"exports/{job_id}/{run_id}/"
