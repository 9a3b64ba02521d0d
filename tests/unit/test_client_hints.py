"""Commands to paste: they bring back what was given, and never the key."""

from __future__ import annotations

import pytest

from conveyor.client.output import command, printable


def test_a_command_repeats_server_and_directory_quoted() -> None:
    shown = command("watch", "J", server="http://h:1/v1", out="my pages")
    assert shown == "conveyor watch J --server http://h:1/v1 --out 'my pages'"


def test_a_command_says_no_more_than_was_given() -> None:
    assert command("watch", "J") == "conveyor watch J"


@pytest.mark.parametrize("name", ["apikey", "api_key", "key", "token", "password", "signature"])
def test_query_values_named_like_keys_are_not_shown_to_people(name: str) -> None:
    shown = printable(f"http://x.test/?a=1&{name}=SECRET&b=2")
    assert "SECRET" not in shown
    assert "a=1" in shown
    assert "b=2" in shown
