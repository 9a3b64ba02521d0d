"""Failure groups: the failed tasks of a run, by reason, code, status and kind of detail.

A group is a function of the failure and its problem alone, so that a row, its run's counts and a
recount agree. A run keeps at most MOST_GROUPS of them; all else that failed lies in OTHER_GROUP,
whose count is what is left of `failed`. Once a task is in there, no group begins but by a recount.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from functools import lru_cache

import msgspec

from conveyor.domain.model import GroupFilter, Problem, TaskFailure

MOST_GROUPS = 200
OTHER_GROUP = "other"
ID_LENGTH = 12
MOST_SAMPLES = 3
"""Task ids that a group shows."""
LONGEST_DETAIL = 200
"""Characters of a detail, after what varies is taken out, by which groups differ."""

_NAME = re.compile(rf"[a-z2-7]{{{ID_LENGTH}}}|{OTHER_GROUP}")
_URL = re.compile(r"\b[A-Za-z][A-Za-z0-9+.-]*://\S+")
_OPENING_QUOTE = re.compile("[\"'`“‘]")
_QUOTED = re.compile(r'"[^"]*"|\'[^\']*\'|`[^`]*`|“[^”]*”|‘[^’]*’')
_LONG_WORD = re.compile(r"[^ ]{8}")
_ID = re.compile(r"\b(?=\w*\d)(?=\w*[A-Za-z])[\w-]{8,}\b")
_NUMBER = re.compile(r"\d+(?:[.,:/-]\d+)*")
_REMEMBERED = 4_096
"""Kinds whose id is not computed again."""


class FailureKind(msgspec.Struct, frozen=True):
    """The common part of the failures of a group, and the group's id: ID_LENGTH letters and digits
    of a digest of the rest. `detail` is without what varies."""

    reason: TaskFailure
    code: str
    status: int
    detail: str
    group_id: str


class FailureGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group of one run: the failure of its first task, and what it counts.

    `detail` is the whole text of that one failure. Times are in milliseconds since the epoch.
    """

    group_id: str
    reason: TaskFailure
    code: str
    status: int
    count: int
    first_at: int
    last_at: int
    detail: str | None = None
    task_ids: tuple[str, ...] = ()


class FailureGroups(msgspec.Struct, frozen=True):
    """The groups of a run and its `failed` counter, of one read; the largest group first.

    `other` is the count of failed tasks in no group, which is that of OTHER_GROUP.
    """

    failed: int
    groups: Sequence[FailureGroup]

    @property
    def other(self) -> int:
        """Return the number of failed tasks that lie in none of the groups."""
        return self.failed - sum(group.count for group in self.groups)


def group_filter(wanted: frozenset[str], kept: Sequence[str]) -> GroupFilter:
    """Choose the tasks of the `wanted` groups, OTHER_GROUP included, of a run that keeps `kept`.
    A group that the run does not keep has no tasks of its own: they lie in OTHER_GROUP."""
    outside = frozenset(kept) if OTHER_GROUP in wanted else None
    return GroupFilter(wanted.intersection(kept), outside)


def failure_kind(failure: TaskFailure, problem: Problem) -> FailureKind:
    """Take what varies from task to task out of a failure: numbers, ids, quotes and URLs."""
    text = problem.detail or problem.title
    # This costs every failed task: a pattern replaces only where a quicker look finds something.
    if "://" in text:
        text = _URL.sub("URL", text)
    if _OPENING_QUOTE.search(text):
        text = _QUOTED.sub("TEXT", text)
    if _LONG_WORD.search(text):
        text = _ID.sub("ID", text)
    text = _NUMBER.sub("N", text)
    return _kind(failure, problem.code, problem.status, " ".join(text.split())[:LONGEST_DETAIL])


@lru_cache(_REMEMBERED)
def _kind(failure: TaskFailure, code: str, status: int, detail: str) -> FailureKind:
    text = "\0".join((failure, code, str(status), detail))
    digest = hashlib.sha256(text.encode()).digest()
    group_id = base64.b32encode(digest)[:ID_LENGTH].decode().lower()
    return FailureKind(failure, code, status, detail, group_id)


def is_group_id(text: str) -> bool:
    """Tell whether a text can name a group."""
    return _NAME.fullmatch(text) is not None
