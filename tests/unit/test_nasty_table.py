"""docs/hostile-answers.md has a row for every kind, and says of Conveyor what the tests assert."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.nasty.answer import Kind
from tests.nasty.corpus import ANSWERS, KINDS
from tests.nasty.table import DOCUMENT, conveyor_column, rows, summary

TEXT = DOCUMENT.read_text(encoding="utf-8")
ROWS = rows(TEXT)


def test_every_kind_has_its_row_and_no_other_has_one() -> None:
    assert list(ROWS) == [kind.name for kind in KINDS]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_row_says_what_the_tests_assert(kind: Kind) -> None:
    name, count, conveyor, curl, aiohttp, why = ROWS[kind.name]
    expected = (kind.name, str(len(kind.answers)), conveyor_column(kind), kind.why)
    assert (name, count, conveyor, why) == expected, "run: .venv/bin/python -m tests.nasty"
    for cell in (curl, aiohttp):
        counts = [int(number) for number in re.findall(r"\((\d+)\)", cell)]
        assert cell
        assert sum(counts) in (0, len(kind.answers))


def test_the_document_is_short_and_names_the_versions_of_the_peers() -> None:
    assert len(TEXT.splitlines()) <= 400
    assert f"{len(ANSWERS)} answers" in TEXT
    assert re.search(r"curl \d+\.\d+\.\d+ and aiohttp \d+\.\d+", TEXT)


def test_verdicts_are_counted_where_they_differ() -> None:
    assert summary(["refused"] * 3) == "refused"
    assert summary(["whole", "refused", "whole"]) == "whole (2) · refused (1)"


@pytest.mark.slow
@pytest.mark.parametrize(("flag", "code"), [("-h", 0), ("--help", 0), ("--nonsense", 2)])
def test_help_and_a_wrong_option_ask_nobody_and_write_nothing(flag: str, code: int) -> None:
    before = DOCUMENT.stat().st_mtime_ns
    # Without a PATH it finds no curl: a run that began would end there.
    ended = subprocess.run(
        [sys.executable, "-m", "tests.nasty", flag],
        cwd=DOCUMENT.parents[1],
        env={"PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == code
    assert "usage: python -m tests.nasty" in ended.stdout + ended.stderr
    assert DOCUMENT.stat().st_mtime_ns == before
