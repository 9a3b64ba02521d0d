"""The classes of sizes and the media types by which results are counted."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.domain.result_shape import (
    LONGEST_TYPE,
    MOST_TYPES,
    OTHER_TYPE,
    SIZE_BOUNDS,
    SIZE_CLASSES,
    ResultShape,
    ShapeCounter,
    media_type,
    size_class,
)

PROPERTY = settings(database=None)


def test_a_bound_begins_its_class() -> None:
    assert SIZE_CLASSES == 8
    assert [size_class(bound) for bound in (0, *SIZE_BOUNDS)] == list(range(SIZE_CLASSES))
    assert [size_class(bound - 1) for bound in SIZE_BOUNDS] == list(range(SIZE_CLASSES - 1))
    assert size_class(10**12) == SIZE_CLASSES - 1


@pytest.mark.parametrize(
    ("content_type", "name"),
    [
        ("text/html", "text/html"),
        (" Text/HTML ; charset=utf-8", "text/html"),
        ("application/json;x=y;z", "application/json"),
        ("", OTHER_TYPE),
        (";charset=x", OTHER_TYPE),
        ("x" * 100, "x" * LONGEST_TYPE),
    ],
)
def test_a_type_counts_without_its_parameters(content_type: str, name: str) -> None:
    assert media_type(content_type) == name


@PROPERTY
@given(st.lists(st.tuples(st.integers(0, 10**8), st.text(max_size=3), st.integers(1, 5))))
def test_every_body_is_counted_once_by_size_and_once_by_type(
    bodies: list[tuple[int, str, int]],
) -> None:
    counter = ShapeCounter.of(ResultShape())
    for size, content_type, count in bodies:
        counter.add(size, content_type, count)
    shape = counter.shape()
    assert sum(shape.sizes) == sum(shape.types.values()) == sum(count for _, _, count in bodies)
    assert len(set(shape.types) - {OTHER_TYPE}) <= MOST_TYPES
    assert ShapeCounter.of(shape).shape() == shape


def test_a_shape_that_was_read_is_left_as_it_is() -> None:
    shape = ResultShape()
    ShapeCounter.of(shape).add(1, "text/html")
    assert shape == ResultShape()
