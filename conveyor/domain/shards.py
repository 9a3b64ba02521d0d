"""Shards: into how many partitions a run's rows go, and which row lies in which.

Count and scheme are decided at submit and pinned on the job: every reader and writer uses the
job's, never today's setting.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from conveyor.domain.model import Job

MAX_SHARDS = 64
WRITE_UNIT = 1_024
"""Bytes of a row that one write unit pays for."""
MOST_UNITS_IN_ONE_SHARD = 2_000
"""Write units up to which a small closed job stays in one partition."""

_FNV_OFFSET, _FNV_PRIME, _FNV_MASK = 0x811C9DC5, 0x01000193, 0xFFFFFFFF


class ShardScheme(StrEnum):
    """How a row's shard follows from its id.

    `stripe`: the index that the id carries, modulo the count; neighbours lie in neighbouring
    shards. `fnv32a`: the id's 32-bit FNV-1a hash, modulo the count.
    """

    STRIPE = "stripe"
    FNV32A = "fnv32a"


class Shards(msgspec.Struct, frozen=True):
    """A layout: the number of shards, from 1, and the scheme."""

    count: int = 1
    scheme: ShardScheme = ShardScheme.STRIPE

    def of(self, task_id: str, index: int) -> int:
        """The shard of a task, from 0; `index` is the one that its id carries."""
        if self.count == 1:
            return 0
        if self.scheme is ShardScheme.STRIPE:
            return index % self.count
        return fnv32a(task_id) % self.count


ONE_SHARD = Shards()


def fnv32a(text: str) -> int:
    """The 32-bit FNV-1a hash of a text's bytes."""
    value = _FNV_OFFSET
    for byte in text.encode():
        value = (value ^ byte) * _FNV_PRIME & _FNV_MASK
    return value


def write_units(row_bytes: int) -> int:
    """What writing a row of so many bytes costs, in write units."""
    return max(1, -(-row_bytes // WRITE_UNIT))


def layout(shards: Shards, *, large: bool, is_open: bool, units: int) -> Shards:
    """The layout of a new job. `shards` is for those that it pays for: large ones, open ones, and
    small ones heavy in bytes, of more than 2,000 write units."""
    pays = large or is_open or units > MOST_UNITS_IN_ONE_SHARD
    return shards if pays and shards.count > 1 else ONE_SHARD


def shards_of(job: Job) -> Shards:
    """The layout that is pinned on a job."""
    return Shards(job.task_shard_count, ShardScheme(job.shard_scheme))
