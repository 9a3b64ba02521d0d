"""Retry-After in both forms, and what is made of nonsense."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor.gateway.headers import retry_after

NOW = 1_767_225_600_000  # Thu, 01 Jan 2026 00:00:00 GMT


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0.0),
        ("7", 7.0),
        (" 7 ", 7.0),
        ("120", 100.0),
        ("9" * 60, 100.0),
        ("Thu, 01 Jan 2026 00:00:30 GMT", 30.0),
        ("Thursday, 01-Jan-26 00:00:30 GMT", 30.0),
        ("Thu Jan  1 00:00:30 2026", 30.0),
        ("Thu, 01 Jan 2026 02:00:30 +0200", 30.0),
        ("Wed, 31 Dec 2025 23:59:59 GMT", 0.0),
        ("Fri, 01 Jan 2027 00:00:00 GMT", 100.0),
        ("", 0.0),
        ("soon", 0.0),
        ("-5", 0.0),
        ("1.5", 0.0),
        ("1e3", 0.0),
        ("٣", 0.0),
        ("Thu, 99 Jan 2026 00:00:30 GMT", 0.0),
        ("9" * 10_000, 100.0),
        ("9" * 65, 100.0),
        ("0" * 100 + "7", 7.0),
        ("9" * 100 + " GMT", 0.0),
    ],
)
def test_reading(text: str, seconds: float) -> None:
    assert retry_after(text, now=NOW, cap=100.0) == seconds


@given(st.text(max_size=80))
def test_no_text_leaves_the_bounds(text: str) -> None:
    assert 0.0 <= retry_after(text, now=NOW, cap=100.0) <= 100.0
