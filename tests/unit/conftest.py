"""Spares unit tests work that none of them is about."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from conveyor.dev import call_table

_CALLS = 1_024


@pytest.fixture(scope="module", autouse=True)
def room_for_calls() -> Iterator[None]:
    """Make ledgers of calls of 64 KB: each store begins one and writes all of it, and with room for
    the most slots they were four fifths of what a run of the tests wrote."""
    with pytest.MonkeyPatch.context() as patch:
        size = call_table._HEADER + _CALLS * call_table._ENTRY
        patch.setattr(call_table, "_SIZE", size)
        yield
