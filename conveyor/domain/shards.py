"""Shards: the number of partitions for a run's rows, and the partition of each row.

Count and scheme are decided at submit and pinned on the job: every reader and writer uses the
job's, never the current setting.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from conveyor.domain.model import Job

WRITE_UNIT = 1_024
"""Bytes of a row that one write unit pays for."""
MOST_UNITS_IN_ONE_SHARD = 2_000
"""Write units up to which a small closed job stays in one partition."""

_FNV_OFFSET, _FNV_PRIME, _FNV_MASK = 0x811C9DC5, 0x01000193, 0xFFFFFFFF


class ShardScheme(StrEnum):
    """The function from a row's id to its shard.

    `stripe`: the index in the id, modulo the count; neighbours lie in neighbouring shards.
    `fnv32a`: the id's 32-bit FNV-1a hash, modulo the count.
    """

    STRIPE = "stripe"
    FNV32A = "fnv32a"


class Shards(msgspec.Struct, frozen=True):
    """A layout: the number of shards, from 1, and the scheme."""

    count: int = 1
    scheme: ShardScheme = ShardScheme.STRIPE

    def of(self, task_id: str, index: int) -> int:
        """Return the shard of a task, from 0; `index` is the one in its id."""
        if self.count == 1:
            return 0
        if self.scheme is ShardScheme.STRIPE:
            return index % self.count
        return fnv32a(task_id) % self.count


ONE_SHARD = Shards()


def fnv32a(text: str) -> int:
    """Return the 32-bit FNV-1a hash of a text's bytes."""
    value = _FNV_OFFSET
    for byte in text.encode():
        value = (value ^ byte) * _FNV_PRIME & _FNV_MASK
    return value


def write_units(row_bytes: int) -> int:
    """Return the write units for a row of `row_bytes` bytes."""
    return max(1, -(-row_bytes // WRITE_UNIT))


def layout(shards: Shards, *, large: bool, is_open: bool, units: int) -> Shards:
    """Choose the layout of a new job.

    Large jobs, open jobs and small jobs heavy in bytes (more than 2,000 write units) get `shards`;
    all others get one partition.
    """
    pays = large or is_open or units > MOST_UNITS_IN_ONE_SHARD
    return shards if pays and shards.count > 1 else ONE_SHARD


def shards_of(job: Job) -> Shards:
    """Return the layout pinned on a job."""
    return Shards(job.task_shard_count, ShardScheme(job.shard_scheme))
