"""Rows in lines in chunks: their bounds, their ids, what they cost."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.domain.model import TaskBody, TaskSpec
from conveyor.domain.shards import write_units
from conveyor.intake.frames import CHUNK_BYTES, CHUNK_ROWS, LINE_ROWS, Chunk, Done, Frame
from conveyor.intake.rows import LINE_BYTES, RowWriter
from tests.unit.intake_lists import RUN, rows_of

PLAIN = TaskSpec("http://a.example/")


def written(specs: list[TaskSpec], steps: list[int]) -> list[Frame]:
    """The frames of tasks that come in steps of some sizes, over and over."""
    frames: list[Frame] = []
    writer = RowWriter(RUN, frames.append)
    place = step = 0
    while place < len(specs):
        writer.add(specs[place : place + steps[step % len(steps)]])
        place += steps[step % len(steps)]
        step += 1
    frames.append(writer.finish())
    return frames


def heavy(size: int) -> TaskSpec:
    """A task of about so many bytes."""
    return TaskSpec("http://a.example/", method="POST", body=TaskBody("x" * size, "text/plain"))


def test_no_row_is_no_chunk() -> None:
    assert written([], [1]) == [Done(0, 0)]


@pytest.mark.slow
@pytest.mark.parametrize("steps", [[1], [999], [1_000], [1_001], [7, 400, 1_000, 33], [3_000]])
def test_lines_and_chunks_are_full_whatever_the_steps(steps: list[int]) -> None:
    frames = written([PLAIN] * 21_234, steps)
    chunks = [frame for frame in frames if isinstance(frame, Chunk)]
    assert [chunk.count for chunk in chunks] == [CHUNK_ROWS, CHUNK_ROWS, 1_234]
    assert rows_of(frames) == [PLAIN] * 21_234
    counts = [line.count(b'{"url"') for chunk in chunks for line in chunk.content.splitlines()]
    assert counts == [LINE_ROWS] * 84 + [234]


def test_heavy_rows_make_shorter_lines_and_chunks() -> None:
    specs = [heavy(100_000)] * 100
    frames = written(specs, [30])
    chunks = [frame for frame in frames if isinstance(frame, Chunk)]
    lines = [line for chunk in chunks for line in chunk.content.splitlines()]
    assert max(map(len, lines)) < LINE_BYTES + 101_000
    assert max(len(chunk.content) for chunk in chunks) < CHUNK_BYTES + LINE_BYTES + 101_000
    assert min(len(chunk.content) for chunk in chunks[:-1]) >= CHUNK_BYTES
    assert rows_of(frames) == specs


def test_a_chunk_never_exceeds_its_rows_where_lines_were_ended_by_bytes() -> None:
    specs = ([PLAIN] * 900 + [heavy(LINE_BYTES)]) + [PLAIN] * 10_000
    assert rows_of(written(specs, [50])) == specs


@pytest.mark.parametrize("length", [1, 900, 980, 988, 989, 990, 1_030, 2_012, 2_013])
def test_write_units_count_the_bytes_of_the_task_as_json(length: int) -> None:
    specs = [TaskSpec("http://a.example/" + "x" * length), PLAIN, TaskSpec("http://a/" + "ä" * 700)]
    done = written(specs, [3])[-1]
    assert done == Done(3, sum(write_units(len(msgspec.json.encode(spec))) for spec in specs))


@settings(database=None, max_examples=30)
@given(
    sizes=st.lists(st.sampled_from([0, 10, 1_000, 60_000, LINE_BYTES]), max_size=60),
    steps=st.lists(st.integers(1, 40), min_size=1, max_size=4),
)
def test_every_mix_comes_out_in_order_with_its_cost(sizes: list[int], steps: list[int]) -> None:
    specs = [heavy(size) for size in sizes]
    frames = written(specs, steps)
    assert rows_of(frames) == specs
    units = sum(write_units(len(msgspec.json.encode(spec))) for spec in specs)
    assert frames[-1] == Done(len(specs), units)
