"""Task ids: deterministic, so that a redelivered write finds its rows, and ordered by submission.

A task id has 26 characters of Crockford's alphabet, like a ULID: seven hold the index in base 32,
nineteen are hexadecimal digits of sha256("run_id:index"). A rerun keeps task ids, so the second
part need not match the run of the row.
"""

from __future__ import annotations

import hashlib
import re

from ulid import ULID

ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
INDEX_LENGTH = 7
TASK_ID_LENGTH = 26
MAX_INDEX = 32**INDEX_LENGTH - 1

_DIGEST_LENGTH = TASK_ID_LENGTH - INDEX_LENGTH
_ULID = re.compile(r"[0-7][0-9A-HJKMNP-TV-Z]{25}")
_TASK_ID = re.compile(r"[0-9A-HJKMNP-TV-Z]{26}")
_DIGITS = str.maketrans(ALPHABET, "0123456789abcdefghijklmnopqrstuv")
"""Crockford's digits to those that `int` reads in base 32."""
_PAIRS = [high + low for high in ALPHABET for low in ALPHABET]


def is_ulid(text: str) -> bool:
    """Return whether the text is a canonical ULID, as job, run, export and key ids are."""
    return _ULID.fullmatch(text) is not None


def made_at(ulid: str) -> int:
    """Return when a ULID was made, in milliseconds since the epoch. Raises ValueError for a text
    that is none."""
    return ULID.from_str(ulid).milliseconds


def is_task_id(text: str) -> bool:
    """Return whether the text has the form of a task id."""
    return _TASK_ID.fullmatch(text) is not None


def task_id(run_id: str, index: int) -> str:
    """Return the id of the task at `index` (from 0) of a run. Raises ValueError beyond
    MAX_INDEX."""
    if not 0 <= index <= MAX_INDEX:
        raise ValueError(f"task index out of range: {index}")
    digest = hashlib.sha256(f"{run_id}:{index}".encode()).hexdigest()
    return encode_index(index) + digest[:_DIGEST_LENGTH].upper()


def task_ids(run_id: str, first_index: int, count: int) -> list[str]:
    """Return the ids of `count` tasks from `first_index` on, faster than by `task_id`.

    Raises ValueError beyond MAX_INDEX.
    """
    if not 0 <= first_index <= first_index + count <= MAX_INDEX + 1:
        raise ValueError(f"task indexes out of range: {count} from {first_index}")
    copy_prefix = hashlib.sha256(f"{run_id}:".encode()).copy
    made: list[str] = []
    end = first_index + count
    for high in range(first_index >> 10, (end + 1_023) >> 10):
        letters = encode_index(high << 10)[:-2]
        for index in range(max(high << 10, first_index), min((high + 1) << 10, end)):
            digest = copy_prefix()
            digest.update(b"%d" % index)
            made.append(letters + _PAIRS[index & 1023] + digest.hexdigest()[:_DIGEST_LENGTH])
    return " ".join(made).upper().split()


def encode_index(index: int) -> str:
    """Encode an index as seven letters that sort in the order of the numbers."""
    return (
        ALPHABET[index >> 30 & 31]
        + _PAIRS[index >> 20 & 1023]
        + _PAIRS[index >> 10 & 1023]
        + _PAIRS[index & 1023]
    )


def task_index(text: str) -> int:
    """Decode the index that a task id carries. Raises ValueError where the text is not a task
    id."""
    if not is_task_id(text):
        raise ValueError("not a task id")
    return int(text[:INDEX_LENGTH].translate(_DIGITS), 32)
