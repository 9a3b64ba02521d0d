"""Nothing printed may drive the terminal or show a password."""

from __future__ import annotations

import json
import unicodedata

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor.client.output import (
    clean,
    clean_json,
    count,
    duration,
    mask_credentials,
    printable,
    shorten,
    to_the_minute_or_second,
)
from conveyor.client.program import FAILED, Failure, guarded


@given(st.text())
def test_what_is_printed_holds_no_control(text: str) -> None:
    shown = clean(text)
    assert not [letter for letter in shown if unicodedata.category(letter) in ("Cc", "Cs")]
    assert not set(shown) & set("\u202a\u202b\u202d\u202e\u2066\u2067\u2069\u200f\u2028")


@pytest.mark.slow
@given(st.dictionaries(st.text(), st.text()))
def test_json_means_the_same_once_cleaned(document: dict[str, str]) -> None:
    line = clean_json(json.dumps(document, ensure_ascii=False))
    assert json.loads(line) == document
    assert line == clean(line)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://user:secret@host/p?q=a@b", "http://***@host/p?q=a@b"),
        ("HTTPS://secret@host", "HTTPS://***@host"),
        ("http://a:p@ss@host/", "http://***@host/"),
        ("see http://u:p@h/ and http://v:q@i/", "see http://***@h/ and http://***@i/"),
        ('{"url":"http:\\/\\/u:p@h"}', '{"url":"http:\\/\\/***@h"}'),
        ("http://host/@me", "http://host/@me"),
        ("http://host?mail=a@b", "http://host?mail=a@b"),
        ("mail a@b", "mail a@b"),
    ],
)
def test_credentials_are_masked_and_the_rest_is_kept(text: str, shown: str) -> None:
    assert mask_credentials(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("2026-01-01T09:00:00+02:00", "2026-01-01 09:00"),
        ("2026-01-01T09:00:00.000Z", "2026-01-01 09:00"),
        ("2026-01-01T09:00", "2026-01-01 09:00"),
        ("2026-01-01T21:04:27+00:00", "2026-01-01 21:04:27"),
    ],
)
def test_seconds_are_shown_where_they_are_not_zero(text: str, shown: str) -> None:
    assert to_the_minute_or_second(text) == shown


def test_a_control_does_not_hide_credentials() -> None:
    assert printable("http://u:secret\x1b[0m@host/") == "http://***@host/"


@pytest.mark.parametrize(
    "name",
    [
        *(
            "apikey",
            "api_key",
            "API-Key",
            "key",
            "token",
            "access_token",
            "accessToken",
            "password",
        ),
        *("secret", "client_secret", "signature", "X-Amz-Signature", "sig", "auth", "app.key"),
    ],
)
def test_parameters_named_as_credentials_are_masked(name: str) -> None:
    for mark in "?&#":
        text = f"failed: http://h/p?a=1{mark}{name}=s3cr%20et&b=2: gone"
        assert printable(text) == f"failed: http://h/p?a=1{mark}{name}=***&b=2: gone"


@pytest.mark.parametrize("name", ["monkey", "keyword", "author", "page", "design", "tokens"])
def test_other_parameters_are_shown(name: str) -> None:
    assert printable(f"http://h/?{name}=1&x=key=2") == f"http://h/?{name}=1&x=key=2"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0.0 s"), (9.94, "9.9 s"), (12, "12 s"), (200, "3 min 20 s"), (7_500, "2 h 5 min")],
)
def test_durations(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_counts_and_cuts() -> None:
    assert (count(1, "file"), count(0, "file"), count(2_000, "file")) == (
        "1 file",
        "0 files",
        "2,000 files",
    )
    assert (shorten("abcd", 4), shorten("abcde", 4)) == ("abcd", "abc…")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (BrokenPipeError(), ""),
        (Failure("it broke"), "conveyor: it broke\n"),
        (OSError(28, "No space left on device"), "conveyor: No space left on device\n"),
    ],
    ids=["reader left", "failure", "full disk"],
)
def test_what_breaks_in_a_task_group_is_told_as_by_itself(
    error: Exception, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    @click.command()
    def broken() -> None:
        raise ExceptionGroup("unhandled errors", [ExceptionGroup("inner", [error])])

    assert guarded(broken, "conveyor", []) == FAILED
    assert capsys.readouterr().err == told
