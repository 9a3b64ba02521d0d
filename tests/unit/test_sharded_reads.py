"""Reading a list in many shards: every row once, in order, and how many rows are read for it."""

from __future__ import annotations

import random

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.shards import Shards, ShardScheme
from conveyor.records.sharded_reads import START, ShardRead, ShardRows, merge_page, stream
from tests.unit.sharded_rows import LAYOUTS, Line, ShardedRows, Walk, walk

PROPERTY = settings(database=None, max_examples=60)
LAYOUT = st.sampled_from(LAYOUTS)
TOTAL = st.integers(0, 2_000)
SIZE = st.integers(1, 1_500)
KEPT = st.sampled_from([1.0, 0.9, 0.5, 0.05])
SEED = st.integers(0, 1_000)
STRIPE, FNV = ShardScheme.STRIPE, ShardScheme.FNV32A


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def sample(total: int, kept: float, seed: int) -> list[int]:
    """Indexes below `total`, some of them left out."""
    chance = random.Random(seed)
    return [index for index in range(total) if chance.random() < kept]


@pytest.mark.slow
@PROPERTY
@given(shards=LAYOUT, total=st.integers(0, 2_000), limit=SIZE, kept=KEPT, seed=SEED)
def test_pages_give_each_row_once_in_order(
    shards: Shards, total: int, limit: int, kept: float, seed: int
) -> None:
    indexes = sample(total, kept, seed)
    rows = ShardedRows(shards, indexes)

    # Small pages of long lists say nothing new.
    done = anyio.run(walk, rows, max(limit, total // 50))

    assert done.indexes == indexes
    assert done.rows_read == rows.rows_read
    assert done.rounds <= len(rows.queries)
    assert all(page.rows for page in done.pages) or not indexes


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8, 9, 63, 64, 65])
@pytest.mark.parametrize("shards", LAYOUTS, ids=str)
async def test_every_small_page_size_gives_each_row_once(shards: Shards, limit: int) -> None:
    for kept in (1.0, 0.5):
        indexes = sample(130, kept, limit)
        assert (await walk(ShardedRows(shards, indexes), limit)).indexes == indexes


@pytest.mark.slow
@PROPERTY
@given(shards=LAYOUT, limit=SIZE, growth=st.integers(1, 100), kept=KEPT, seed=SEED)
def test_rows_that_come_between_pages_are_found(
    shards: Shards, limit: int, growth: int, kept: float, seed: int
) -> None:
    indexes = sample(1_000, kept, seed)
    rows = ShardedRows(shards, indexes)

    async def while_growing() -> Walk:
        def grow(page: int) -> None:
            if page <= 3:
                added = range(rows.end, rows.end + growth)
                rows.append(added)
                indexes.extend(added)

        return await walk(rows, max(limit, 20), between=grow)

    assert anyio.run(while_growing).indexes == indexes


@pytest.mark.slow
@pytest.mark.parametrize("limit", [10, 100, 1_000])
@pytest.mark.parametrize("shards", LAYOUTS, ids=str)
async def test_rows_that_come_between_two_queries_of_a_page_keep_their_order(
    shards: Shards, limit: int
) -> None:
    rows = ShardedRows(shards, range(500))
    read = rows.reader()

    async def while_written(wanted: ShardRead) -> ShardRows[Line]:
        answer = await read(wanted)
        if rows.end < 2_000:
            rows.append(range(rows.end, rows.end + 5))
        return answer

    done = await walk(rows, limit, read=while_written)

    assert done.indexes == list(range(len(done.indexes)))
    assert len(done.indexes) >= 500


# Shards, page: rows read per row returned and rounds of queries a page, at most.
READS = {
    (Shards(1), 100): (1.0, 1.0),
    (Shards(1), 1_000): (1.0, 1.0),
    (Shards(8, STRIPE), 100): (1.0, 1.0),
    (Shards(8, STRIPE), 1_000): (1.0, 1.0),
    (Shards(16, STRIPE), 100): (1.0, 1.0),
    (Shards(16, STRIPE), 1_000): (1.0, 1.0),
    (Shards(64, STRIPE), 40): (1.0, 1.0),
    (Shards(8, FNV), 100): (1.42, 1.8),
    (Shards(8, FNV), 1_000): (1.12, 1.9),
    (Shards(16, FNV), 100): (1.58, 2.2),
    (Shards(16, FNV), 1_000): (1.18, 2.2),
}


@pytest.mark.slow
@pytest.mark.parametrize(("shards", "limit"), READS, ids=str)
async def test_a_full_enumeration_reads_little_more_than_it_returns(
    shards: Shards, limit: int
) -> None:
    most_reads, most_rounds = READS[shards, limit]
    rows = ShardedRows(shards, range(20_000))

    done = await walk(rows, limit)

    assert done.indexes == list(range(20_000))
    assert len(done.pages) == 20_000 // limit
    assert rows.rows_read / 20_000 <= most_reads
    assert done.rounds / len(done.pages) <= most_rounds


@pytest.mark.slow
@pytest.mark.parametrize("shards", [Shards(8, STRIPE), Shards(16, STRIPE), Shards(8, FNV)], ids=str)
@pytest.mark.parametrize("kept", [0.9, 0.5, 0.1])
async def test_holes_cost_little(shards: Shards, kept: float) -> None:
    indexes = sample(20_000, kept, 1)
    rows = ShardedRows(shards, indexes)

    done = await walk(rows, 1_000)

    assert done.indexes == indexes
    assert rows.rows_read / len(indexes) <= 1.25
    assert done.rounds / len(done.pages) <= 6


async def test_rows_that_all_lie_in_one_shard_need_few_rounds() -> None:
    indexes = list(range(0, 80_000, 8))
    rows = ShardedRows(Shards(8), indexes)

    done = await walk(rows, 1_000)

    assert done.indexes == indexes
    assert rows.rows_read / len(indexes) <= 1.05
    assert done.rounds / len(done.pages) <= 2


async def test_a_round_asks_all_shards_at_once_and_no_shard_that_has_no_part() -> None:
    rows = ShardedRows(Shards(8), range(100))
    read = rows.reader()

    page = await merge_page(read, rows.shards, (START,) * 8, 24, end=100)
    assert rows.at_once == 8
    assert [query.limit for query in rows.queries] == [3] * 8
    assert (page.rounds, page.rows_read) == (1, 24)

    rows.queries.clear()
    page = await merge_page(read, rows.shards, page.positions, 3, end=100)
    assert [(query.shard, query.limit) for query in rows.queries] == [(0, 1), (1, 1), (2, 1)]
    assert page.positions == (24, 25, 26, 19, 20, 21, 22, 23)


@pytest.mark.parametrize("most_read", [None, 2_000])
async def test_one_shard_is_one_plain_query(most_read: int | None) -> None:
    rows = ShardedRows(Shards(1), range(10))

    page = await merge_page(rows.reader(), rows.shards, (2,), 4, end=10, most_read=most_read)
    assert page.discarded == 0

    assert rows.queries == [ShardRead(0, 2, 4, most_read)]
    assert [row.index for row in page.rows] == [3, 4, 5, 6]
    assert (page.positions, page.more, page.rows_read, page.rounds) == ((6,), True, 4, 1)
    last = await merge_page(rows.reader(), rows.shards, (5,), 4, end=10, most_read=most_read)
    assert (last.more, last.rows_read) == (False, 4)


@pytest.mark.slow
@PROPERTY
@given(
    shards=LAYOUT,
    limit=SIZE,
    matching=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    kept=KEPT,
    by_index=st.booleans(),
    most_read=st.integers(64, 400),
    seed=SEED,
)
def test_filtered_pages_give_each_match_once_within_their_bound(
    *,
    shards: Shards,
    limit: int,
    matching: float,
    kept: float,
    by_index: bool,
    most_read: int,
    seed: int,
) -> None:
    limit = max(limit, 20)
    indexes = sample(2_000, kept, seed)
    wanted = {index for index in indexes if random.Random(index + seed).random() < matching}
    rows = ShardedRows(shards, indexes)
    read = rows.reader(wanted.__contains__, by_index=by_index)

    async def filtered() -> Walk:
        return await walk(rows, limit, read=read, most_read=most_read)

    done = anyio.run(filtered)

    assert done.indexes == sorted(wanted)
    assert max(page.rows_read for page in done.pages) <= most_read


@pytest.mark.slow
@pytest.mark.parametrize("by_index", [False, True])
@pytest.mark.parametrize("shards", [Shards(1), Shards(8, STRIPE), Shards(8, FNV)], ids=str)
async def test_ten_matches_in_a_hundred_thousand_rows_are_found_page_by_page(
    shards: Shards, *, by_index: bool
) -> None:
    wanted = set(random.Random(7).sample(range(100_000), 10))
    rows = ShardedRows(shards, range(100_000))
    read = rows.reader(wanted.__contains__, by_index=by_index)

    done = await walk(rows, 100, read=read, most_read=2_000)

    assert done.indexes == sorted(wanted)
    assert max(page.rows_read for page in done.pages) <= 2_000
    if by_index:
        assert len(done.pages) == 1
        assert rows.rows_read == 10
    else:
        assert len(done.pages) <= 60
        assert rows.rows_read <= 110_000


async def test_a_match_waits_for_a_shard_that_was_cut_off_below_it() -> None:
    """Shard 1 has a match at 5, but shard 0 was read to 2 only and has another one at 4."""
    rows = ShardedRows(Shards(2), range(8))
    read = rows.reader({4, 5}.__contains__)

    first = await merge_page(read, rows.shards, (START, START), 10, end=8, most_read=5)
    assert (first.rows, first.more) == ([], True)
    second = await merge_page(read, rows.shards, first.positions, 10, end=8, most_read=8)
    assert [row.index for row in second.rows] == [4, 5]
    assert not second.more


@pytest.mark.slow
@PROPERTY
@given(
    shards=LAYOUT, total=st.integers(0, 2_000), piece=st.integers(1, 1_500), kept=KEPT, seed=SEED
)
def test_a_stream_reads_every_row_once_in_order(
    shards: Shards, total: int, piece: int, kept: float, seed: int
) -> None:
    indexes = sample(total, kept, seed)
    rows = ShardedRows(shards, indexes)
    piece = max(piece, total // 50)
    held = []

    async def streamed() -> list[int]:
        got: list[int] = []
        async for row in stream(rows.reader(), shards, piece=piece):
            held.append(rows.rows_read - len(got))
            got.append(row.index)
        return got

    assert anyio.run(streamed) == indexes
    assert rows.rows_read == len(indexes)
    assert max(held, default=0) <= 1.5 * (piece + shards.count)


async def test_a_stream_asks_all_shards_at_once() -> None:
    rows = ShardedRows(Shards(8), range(8_000))

    assert [row.index async for row in stream(rows.reader(), rows.shards, piece=800)] == list(
        range(8_000)
    )

    assert rows.at_once == 8
    assert len(rows.queries) == 80 + 7  # all but one shard are asked once more for their end


@pytest.mark.parametrize("shards", [Shards(1), Shards(8)], ids=str)
async def test_a_failed_query_fails_as_itself(shards: Shards) -> None:
    async def read(wanted: ShardRead) -> ShardRows[Line]:
        if wanted.shard == shards.count - 1:
            raise ConveyorError(ErrorCode.UNAVAILABLE, "the disk is full")
        return ShardRows([], None, 0)

    with pytest.raises(ConveyorError, match="the disk is full"):
        await merge_page(read, shards, (START,) * shards.count, 100)
    with pytest.raises(ConveyorError, match="the disk is full"):
        _ = [row async for row in stream(read, shards, piece=100)]
