"""The bucket of tokens that request limits count by."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from conveyor.domain.token_bucket import Bucket, take


def test_a_full_bucket_gives_a_burst_and_then_says_when() -> None:
    bucket, wait = take(None, 0.0, rate=2.0, burst=2)
    bucket, again = take(bucket, 0.0, rate=2.0, burst=2)
    bucket, refused = take(bucket, 0.0, rate=2.0, burst=2)
    assert (wait, again, refused) == (0.0, 0.0, 0.5)
    assert take(bucket, 0.5, rate=2.0, burst=2)[1] == 0.0


def test_a_clock_that_goes_back_takes_no_token_away() -> None:
    assert take(Bucket(1.0, 100.0), 40.0, rate=2.0, burst=2) == (Bucket(0.0, 40.0), 0.0)


@given(
    rate=st.floats(0.001, 1_000),
    burst=st.integers(1, 50),
    pauses=st.lists(st.floats(0, 10), max_size=60),
)
def test_never_more_than_the_burst_and_the_rate_and_waiting_is_enough(
    rate: float, burst: int, pauses: list[float]
) -> None:
    bucket, now, passed = None, 0.0, 0
    for pause in pauses:
        now += pause
        bucket, wait = take(bucket, now, rate=rate, burst=burst)
        passed += wait == 0.0
        assert passed <= burst + rate * now + 1e-6
        assert take(bucket, now + wait, rate=rate, burst=burst)[1] == 0.0 or not wait
