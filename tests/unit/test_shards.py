"""Layouts: the shard of each row, the jobs with many shards, and the cursors of their lists."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.domain import ids
from conveyor.domain.model import Job, JobStatus
from conveyor.domain.shards import (
    ONE_SHARD,
    Shards,
    ShardScheme,
    fnv32a,
    layout,
    shards_of,
    write_units,
)
from conveyor.service.results import (
    MAX_LENGTH,
    decode_positions,
    encode_cursor,
    encode_positions,
)
from conveyor.settings.validators import MOST_SHARDS

PROPERTY = settings(database=None)
RUN = "01ARZ3NDEKTSV4RRFFQ69G5FAV"
EIGHT = Shards(8)


@pytest.mark.parametrize(
    ("text", "value"),
    [("", 0x811C9DC5), ("a", 0xE40C292C), ("b", 0xE70C2DE5), ("foobar", 0xBF9CF968)],
)
def test_the_hash_is_the_published_one(text: str, value: int) -> None:
    assert fnv32a(text) == value


@PROPERTY
@given(index=st.integers(0, ids.MAX_INDEX), count=st.integers(1, MOST_SHARDS))
def test_a_row_lies_in_one_shard_by_its_id_alone(index: int, count: int) -> None:
    task_id = ids.task_id(RUN, index)
    assert Shards(count, ShardScheme.STRIPE).of(task_id, index) == index % count
    assert Shards(count, ShardScheme.FNV32A).of(task_id, index) == fnv32a(task_id) % count


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ShardScheme)
@pytest.mark.parametrize("count", [2, 8, 16, 64])
def test_rows_spread_evenly(scheme: ShardScheme, count: int) -> None:
    shards = Shards(count, scheme)
    held = Counter(shards.of(ids.task_id(RUN, index), index) for index in range(20_000))
    assert len(held) == count
    # Six standard deviations of a fair draw.
    assert max(abs(rows - 20_000 / count) for rows in held.values()) <= 6 * (20_000 / count) ** 0.5


def test_a_layout_is_for_the_jobs_that_it_pays_for() -> None:
    small = {"large": False, "is_open": False}
    assert layout(EIGHT, **small, units=2_000) == ONE_SHARD
    assert layout(EIGHT, **small, units=2_001) == EIGHT
    assert layout(EIGHT, large=True, is_open=False, units=1) == EIGHT
    assert layout(EIGHT, large=False, is_open=True, units=0) == EIGHT
    hashed = Shards(8, ShardScheme.FNV32A)
    assert layout(hashed, large=True, is_open=False, units=1) == hashed
    for count in (1, 0, -1):
        assert layout(Shards(count), large=True, is_open=True, units=9_999) == ONE_SHARD
    assert [write_units(size) for size in (0, 1, 1_024, 1_025, 4_096)] == [1, 1, 1, 2, 4]


def test_a_job_keeps_the_layout_that_it_was_made_with() -> None:
    job = Job(
        job_id=RUN,
        caller="caller",
        status=JobStatus.OPEN,
        created_at=0,
        updated_at=0,
        task_shard_count=16,
        shard_scheme="fnv32a",
    )
    assert shards_of(job) == Shards(16, ShardScheme.FNV32A)


POSITIONS = st.lists(st.integers(-1, ids.MAX_INDEX), min_size=1, max_size=MOST_SHARDS)


@PROPERTY
@given(positions=POSITIONS)
def test_positions_come_back_and_their_cursor_stays_short(positions: list[int]) -> None:
    text = encode_positions(RUN, positions)
    assert decode_positions(text) == (RUN, tuple(positions))
    assert len("sh:" + encode_cursor(text, scope="list", key=b"k" * 32)) <= MAX_LENGTH


def test_the_longest_cursor_has_room() -> None:
    widest = [-1, *[ids.MAX_INDEX] * (MOST_SHARDS - 1)]
    longest = encode_cursor(encode_positions(RUN, widest), scope="list", key=b"k" * 32)
    assert MAX_LENGTH // 2 < len(longest) + 3 <= 760
    usual = range(999_936, 1_000_000)
    assert len(encode_cursor(encode_positions(RUN, usual), scope="list", key=b"k" * 32)) < 300


@pytest.mark.parametrize(
    "text",
    ["", RUN, f"{RUN}.1", f"{RUN}.1.", f"{RUN}.01.0", f"{RUN}.1.-1", f"{RUN}.1.A", f"{RUN}.1. 0"],
)
def test_other_positions_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="."):
        decode_positions(text)
