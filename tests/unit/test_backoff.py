"""Backoff: exponential, bounded, jittered, the same for each attempt number."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.domain.backoff import Backoff

PROPERTY = settings(database=None)
JITTER = st.floats(0, 1, exclude_max=True)
BACKOFF = Backoff(1.0, 300.0)


@pytest.mark.parametrize(
    ("attempt", "expected"), [(0, 1.0), (1, 1.0), (2, 2.0), (3, 4.0), (9, 256.0), (10, 300.0)]
)
def test_it_doubles_up_to_the_cap(attempt: int, expected: float) -> None:
    assert BACKOFF.delay(attempt) == expected
    assert BACKOFF.spread(attempt, 0.5) == expected
    assert BACKOFF.full_jitter(attempt, 0.5) == expected / 2


def test_another_factor_grows_by_that_factor() -> None:
    assert [Backoff(1.0, 50.0, factor=3.0).delay(attempt) for attempt in range(1, 6)] == [
        1.0,
        3.0,
        9.0,
        27.0,
        50.0,
    ]


def test_without_a_cap_it_stays_finite() -> None:
    assert Backoff(1.0).delay(10_000_000) == 2.0**32


@PROPERTY
@given(attempt=st.integers(-5, 10_000_000), jitter=JITTER)
def test_it_stays_within_its_bounds(attempt: int, jitter: float) -> None:
    assert 0.5 <= BACKOFF.spread(attempt, jitter) <= 450.0
    assert 0.0 <= BACKOFF.full_jitter(attempt, jitter) < BACKOFF.delay(attempt)


@PROPERTY
@given(attempt=st.integers(1, 100), low=JITTER, high=JITTER)
def test_more_jitter_and_more_attempts_wait_longer(attempt: int, low: float, high: float) -> None:
    first, second = sorted((low, high))
    shorter = BACKOFF.spread(attempt, first)
    assert shorter <= BACKOFF.spread(attempt, second)
    assert shorter <= BACKOFF.spread(attempt + 1, first)


def test_a_base_of_nothing_waits_for_nothing() -> None:
    assert Backoff(0.0, 300.0).spread(50, 0.9) == 0.0
