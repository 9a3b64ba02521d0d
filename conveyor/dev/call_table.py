"""The ledger of gateway calls: a table of slots in a file that is mapped into memory.

A note costs no system call, and the page cache keeps it when the process is killed. A boot reads
the table that the process before left. Where the file is missing or damaged, it reads nothing, and
every claim counts as one whose call had begun.

The file begins with a header: a mark, the ledger's life, and a byte that says whether calls were
begun that found no room. Entries of equal length follow. The last byte of an entry is written last:
while it is 0, the entry is free, or its call has not begun.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path

from conveyor.domain.ids import TASK_ID_LENGTH, is_task_id, is_ulid
from conveyor.ports.pipeline import CallLedger

ENTRIES = 20_480
"""Calls begun and not settled that the table has room for: two for each of the most slots."""

_MARK = b"conveyor calls 1\n"
_LIFE = slice(len(_MARK), len(_MARK) + TASK_ID_LENGTH)
_OVERFLOWN = _LIFE.stop
_HEADER = 64
_ENTRY = 64
_RUN = slice(0, TASK_ID_LENGTH)
_TASK = slice(_RUN.stop, _RUN.stop + TASK_ID_LENGTH)
_NUMBER = slice(_TASK.stop, _TASK.stop + 8)
_BEGUN = _ENTRY - 1
_SIZE = _HEADER + ENTRIES * _ENTRY


@dataclass(frozen=True, slots=True)
class BegunCalls:
    """The contents of an earlier ledger: its life, and the claims whose calls had begun, as
    (run_id, task_id, claim_number)."""

    life: str
    claims: frozenset[tuple[str, str, int]]


def read_begun(path: Path) -> BegunCalls | None:
    """Read what an earlier process left; None where the file does not tell."""
    try:
        data = path.read_bytes()
        if len(data) != _SIZE or not data.startswith(_MARK) or data[_OVERFLOWN]:
            return None
        life = data[_LIFE].decode("ascii")
        begun = enumerate(data[_HEADER + _BEGUN :: _ENTRY])
        places = (_HEADER + index * _ENTRY for index, mark in begun if mark)
        claims = frozenset(_read(data[at : at + _ENTRY]) for at in places)
    except (OSError, ValueError):
        return None
    return BegunCalls(life, claims) if is_ulid(life) else None


def _read(entry: bytes) -> tuple[str, str, int]:
    """Decode an entry. Raises ValueError for one that no ledger writes."""
    run_id, task_id = entry[_RUN].decode("ascii"), entry[_TASK].decode("ascii")
    if entry[_BEGUN] != 1 or not is_ulid(run_id) or not is_task_id(task_id):
        raise ValueError("not an entry")
    return run_id, task_id, int.from_bytes(entry[_NUMBER], "little")


class CallTable(CallLedger):
    """The ledger of this process, in an empty table of its own."""

    def __init__(self, path: Path, life: str) -> None:
        self._life = life
        self._map = _create(path, life)
        # The last one freed is used next, so that few pages are touched.
        self._free: list[int] = []
        self._fresh = iter(range(_HEADER, _SIZE, _ENTRY))

    @property
    def life(self) -> str:
        return self._life

    def begin(self, run_id: str, task_id: str, claim_number: int) -> int:
        at = self._free.pop() if self._free else next(self._fresh, -1)
        if at < 0:
            # The boot after this one must not take this claim for one that only waited.
            self._map[_OVERFLOWN] = 1
            return -1
        number = claim_number.to_bytes(8, "little")
        self._map[at : at + _NUMBER.stop] = run_id.encode() + task_id.encode() + number
        self._map[at + _BEGUN] = 1
        return at

    def end(self, note: int) -> None:
        if note >= 0:
            self._map[note + _BEGUN] = 0
            self._free.append(note)

    def close(self) -> None:
        """Unmap the file. No call may follow."""
        self._map.close()


def _create(path: Path, life: str) -> mmap.mmap:
    """Put an empty table in the place of the one before, and map it.

    The zeros are written, because to touch a hole of a file on a full disk would end the process.
    Where no file can be written, the table is in memory alone: the next boot then finds one that is
    not of this life, which tells it nothing.
    """
    aside = path.with_name(f"{path.name}.new")
    empty = (_MARK + life.encode("ascii")).ljust(_SIZE, b"\0")
    try:
        descriptor = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "r+b") as file:
            file.write(empty)
            file.flush()
            table = mmap.mmap(file.fileno(), _SIZE)
        os.rename(aside, path)
    except OSError:
        table = mmap.mmap(-1, _SIZE)
        table[:] = empty
    return table
