"""Backoff: exponential, bounded, jittered, never below what a server asked for."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.domain.backoff import retry_delay

PROPERTY = settings(database=None)
JITTER = st.floats(0, 1, exclude_max=True)


@pytest.mark.parametrize(
    ("attempt", "expected"), [(0, 1.0), (1, 1.0), (2, 2.0), (3, 4.0), (9, 256.0), (10, 300.0)]
)
def test_it_doubles_up_to_the_cap(attempt: int, expected: float) -> None:
    assert retry_delay(attempt, base=1.0, cap=300.0, jitter=0.5) == expected


@PROPERTY
@given(attempt=st.integers(-5, 10_000_000), jitter=JITTER)
def test_it_stays_within_its_bounds(attempt: int, jitter: float) -> None:
    assert 0.5 <= retry_delay(attempt, base=1.0, cap=300.0, jitter=jitter) <= 450.0


@PROPERTY
@given(attempt=st.integers(1, 100), low=JITTER, high=JITTER)
def test_more_jitter_and_more_attempts_wait_longer(attempt: int, low: float, high: float) -> None:
    first, second = sorted((low, high))
    shorter = retry_delay(attempt, base=1.0, cap=300.0, jitter=first)
    assert shorter <= retry_delay(attempt, base=1.0, cap=300.0, jitter=second)
    assert shorter <= retry_delay(attempt + 1, base=1.0, cap=300.0, jitter=first)


@PROPERTY
@given(attempt=st.integers(1, 100), jitter=JITTER, asked=st.floats(0, 1e6))
def test_retry_after_is_a_lower_bound(attempt: int, jitter: float, asked: float) -> None:
    own = retry_delay(attempt, base=1.0, cap=300.0, jitter=jitter)
    assert retry_delay(attempt, base=1.0, cap=300.0, jitter=jitter, at_least=asked) == max(
        own, asked
    )


def test_a_base_of_nothing_waits_for_nothing() -> None:
    assert retry_delay(50, base=0.0, cap=300.0, jitter=0.9) == 0.0
