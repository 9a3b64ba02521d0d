"""Log lines: what is away is one line, and the same line again comes ever more seldom."""

from __future__ import annotations

import ast
import logging
from pathlib import Path

import pytest

import conveyor
from conveyor.roles.logs import FORGOTTEN_AFTER, LONGEST_PAUSE, Repeats

ROOT = Path(conveyor.__file__).parent


def record(text: str, at: float, level: int = logging.WARNING) -> logging.LogRecord:
    made = logging.LogRecord("conveyor.engine", level, "", 0, "it failed: %s", (text,), None)
    made.created = at
    return made


def passed(repeats: Repeats, text: str, *times: float) -> list[str]:
    """The lines that are left of the same one, said at those times."""
    records = [record(text, at) for at in times]
    return [one.getMessage() for one in records if repeats.filter(one)]


def test_the_same_line_comes_ever_more_seldom_and_counts_what_was_left_out() -> None:
    said = passed(Repeats(), "redis", *map(float, range(31)))

    assert said == [
        "it failed: redis",
        "it failed: redis (and 1 times before)",
        "it failed: redis (and 3 times before)",
        "it failed: redis (and 7 times before)",
        "it failed: redis (and 15 times before)",
    ]


def test_no_line_is_silent_for_longer_than_the_longest_pause() -> None:
    hour = [float(second) for second in range(3_600)]
    assert len(passed(Repeats(), "redis", *hour)) >= 3_600 / LONGEST_PAUSE


def test_what_was_not_said_for_a_while_is_new_again() -> None:
    repeats = Repeats()
    passed(repeats, "redis", 0.0, 1.0)

    assert passed(repeats, "redis", 1.0 + FORGOTTEN_AFTER) == ["it failed: redis"]


def test_others_are_not_held_back() -> None:
    repeats = Repeats()
    passed(repeats, "redis", 0.0)

    assert passed(repeats, "sqs", 0.1) == ["it failed: sqs"]
    assert repeats.filter(record("redis", 0.1, logging.INFO))
    with_field = record("redis", 0.1)
    with_field.run_id = "R"
    assert repeats.filter(with_field)
    with_traceback = record("redis", 0.1)
    with_traceback.exc_info = (ValueError, ValueError("x"), None)
    assert repeats.filter(with_traceback)


@pytest.mark.parametrize("room", ["engine", "handlers"])
def test_what_is_foreseen_has_no_traceback(room: str) -> None:
    """A service that is away is a ConveyorError: whoever catches those alone logs one line."""
    told = [
        f"{path.name}:{call.lineno}"
        for path in (ROOT / room).glob("*.py")
        for handler in ast.walk(ast.parse(path.read_text()))
        if isinstance(handler, ast.ExceptHandler)
        and isinstance(handler.type, ast.Name)
        and handler.type.id == "ConveyorError"
        for call in ast.walk(handler)
        if isinstance(call, ast.Call) and _has_traceback(call)
    ]
    assert told == []


def _has_traceback(call: ast.Call) -> bool:
    by_name = isinstance(call.func, ast.Attribute) and call.func.attr == "exception"
    return by_name or any(keyword.arg == "exc_info" for keyword in call.keywords)
