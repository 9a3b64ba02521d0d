"""The keys of bodies in the blob store, how many days a store keeps them, and their removal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from zlib import crc32

from conveyor.aio.concurrency import Remove
from conveyor.domain.ids import is_ulid
from conveyor.ports.blobs import BlobPurge

SPREAD = 16
"""Prefixes over which the bodies of a run are spread."""
_NAME = r"(?!\.\.?(?:/|\Z))[A-Za-z0-9._-]+"
_KEY = re.compile(rf"(?!tmp(?:/|\Z)){_NAME}(?:/{_NAME})*")


def checked_key(key: str) -> str:
    """Return the key. Raises ValueError for a text that is no key.

    "tmp/" is left to the stores, for what is not whole yet.
    """
    if _KEY.fullmatch(key) is None:
        raise ValueError("not a blob key")
    return key


def checked_prefix(prefix: str) -> str:
    """Return the prefix. Raises ValueError unless it is a key and then a slash."""
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
    """The key of one claim's body: two claims of a task never write to the same key.

    A store that splits its keys in order, as S3 does, spreads a run only if keys written at one
    time differ early: so a digit of a checksum comes before the index, which grows with time.
    """
    prefix = run_prefix(job_id, run_id, lifecycle_days)
    digit = crc32(task_id.encode()) % SPREAD
    return f"{prefix}{digit:x}{task_id[:4]}/{task_id}.{claim_number}"


def is_written_once(key: str) -> bool:
    """Tell whether nobody ever writes other bytes under a key: those of bodies, not of exports."""
    return key.startswith("results/")


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


TEMPLATES = "templates/"
"""The prefix of the task lists of all scheduled jobs."""


def template_prefix(job_id: str) -> str:
    """The prefix of the task lists of a scheduled job, which stay until the job is deleted."""
    return f"{TEMPLATES}{job_id}/"


def template_list_prefix(job_id: str, list_id: str) -> str:
    """The prefix of one of them: two attempts at one submit stage a list each."""
    return f"{template_prefix(job_id)}{list_id}/"


def template_key(job_id: str, list_id: str, first_index: int) -> str:
    """The key of one chunk of such a list, named by the index of its first task."""
    return f"{template_list_prefix(job_id, list_id)}{first_index:011}"


def template_lists(keys: Sequence[str]) -> list[tuple[str, str]]:
    """Return the (job_id, list_id) of the lists that keys of chunks name, once each."""
    parts = (key.split("/") for key in keys)
    found = {(names[1], names[2]) for names in parts if len(names) == 4}
    return sorted(names for names in found if all(map(is_ulid, names)))


def input_key(input_id: str) -> str:
    """The key of an uploaded file of tasks."""
    return f"inputs/{input_id}"


def export_key(job_id: str, run_id: str, export_id: str) -> str:
    """The key of a finished export."""
    return f"{export_prefix(job_id, run_id)}{export_id}"


def export_prefix(job_id: str, run_id: str) -> str:
    """The prefix that holds every export of a run."""
    return f"exports/{job_id}/{run_id}/"


BODIES_A_STEP = 256
"""Bodies that a remover takes at a time."""


def bodies_below(blobs: BlobPurge, prefix: str) -> Remove:
    """Return a function that removes bodies below a prefix."""
    return lambda size: blobs.delete_prefix(prefix, limit=size)
