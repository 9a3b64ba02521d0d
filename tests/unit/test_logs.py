"""Log lines: an outage is one line, and the same line is repeated less and less often."""

from __future__ import annotations

import ast
import json
import logging
from pathlib import Path
from typing import Any

import pytest

import conveyor
from conveyor.aio.log_output import NEWS
from conveyor.roles.logs import FORGOTTEN_AFTER, PAUSES, JsonFormatter, Repeats, TextFormatter
from conveyor.settings import colour_allowed

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
    assert len(passed(Repeats(), "redis", *hour)) >= 3_600 / PAUSES.cap


def test_what_is_news_each_time_is_said_each_time() -> None:
    records = [record("the same wrong word", at) for at in (0.0, 1.0, 1.5)]
    for one in records:
        vars(one).update(NEWS)
    repeats = Repeats()
    assert all(repeats.filter(one) for one in records)
    assert "is_news" not in TextFormatter().format(records[0])
    assert "is_news" not in JsonFormatter().format(records[0])


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


def raised(kind: type[Exception], *, elsewhere: bool = False) -> Exception:
    """An exception with a traceback, from one of two places."""
    try:
        if elsewhere:
            raise kind("Attributes")
        raise kind("Attributes")
    except Exception as error:
        return error


def broken(error: Exception, at: float) -> logging.LogRecord:
    made = record(repr(error), at, logging.ERROR)
    made.exc_info = (type(error), error, error.__traceback__)
    return made


def test_the_same_traceback_is_shown_in_full_once_and_then_ever_more_seldom() -> None:
    repeats = Repeats()
    second = [broken(raised(KeyError), number / 41) for number in range(41)]
    later = broken(raised(KeyError), 2.0)

    passed = [one for one in [*second, later] if repeats.filter(one)]
    assert [one.getMessage() for one in passed] == [
        "it failed: KeyError('Attributes')",
        "it failed: KeyError('Attributes') (and 40 times before)",
    ]
    assert "in raised" in TextFormatter().format(passed[0])


def test_an_error_that_says_something_else_each_time_is_the_same_one() -> None:
    def counted(number: int) -> logging.LogRecord:
        try:
            raise KeyError(f"call {number}")
        except KeyError as error:
            return broken(error, float(number))

    repeats = Repeats()
    said = [one.getMessage() for one in map(counted, range(31)) if repeats.filter(one)]
    assert said == [
        "it failed: KeyError('call 0')",
        "it failed: KeyError('call 2') (and 1 times before)",
        "it failed: KeyError('call 6') (and 3 times before)",
        "it failed: KeyError('call 14') (and 7 times before)",
        "it failed: KeyError('call 30') (and 15 times before)",
    ]


def test_a_traceback_of_another_kind_or_place_is_not_held_back() -> None:
    repeats = Repeats()
    assert repeats.filter(record("KeyError('Attributes')", 0.0, logging.ERROR))
    assert repeats.filter(broken(raised(KeyError), 0.1))
    assert repeats.filter(broken(raised(KeyError, elsewhere=True), 0.2))
    other = broken(raised(LookupError), 0.3)
    other.args = ("KeyError('Attributes')",)
    assert repeats.filter(other)
    without_place = broken(KeyError("Attributes"), 0.4)
    assert repeats.filter(without_place)
    assert not repeats.filter(broken(raised(KeyError), 0.5))


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


# -- lines for people --


def said_of(text: str, level: int = logging.INFO, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("conveyor.tasks", level, "", 0, text, None, None)
    made.created = 1_769_860_805.25
    made.__dict__.update(fields)
    return made


ENDED: dict[str, Any] = {
    "task_id": "T" * 26,
    "run_id": "R" * 26,
    "state": "failed",
    "ms": 312,
    "attempt": 3,
    "url": "https://a.test/{x}?a,b:c",
    "reason": "blocked: RESP001",
}


def test_the_end_of_a_task_is_one_short_line() -> None:
    plain, terminal = TextFormatter(), TextFormatter(for_terminal=True)
    line = "failed 312 ms, attempt 3, https://a.test/{x}?a,b:c: blocked: RESP001"
    good = said_of("task ended", **{**ENDED, "state": "successful", "reason": None})

    assert plain.format(said_of("task ended", **ENDED)) == (
        f"2026-01-31T12:00:05.250Z info conveyor.tasks {line}"
    )
    assert terminal.format(said_of("task ended", **ENDED)) == f"12:00:05 {line}"
    assert terminal.format(good) == (
        "12:00:05 successful 312 ms, attempt 3, https://a.test/{x}?a,b:c"
    )
    lapsed = said_of("task ended", task_id="T", run_id="R", state="failed", reason="interrupted")
    assert terminal.format(lapsed) == "12:00:05 failed: interrupted"


def test_json_keeps_every_field() -> None:
    line = JsonFormatter().format(said_of("task ended", **ENDED))

    assert {name: json.loads(line)[name] for name in ENDED} == ENDED
    assert json.loads(line)["message"] == "task ended"


def test_other_lines_have_their_fields_and_a_terminal_their_level() -> None:
    terminal = TextFormatter(for_terminal=True)
    request = said_of("request", method="GET", path="/v1/jobs\x1b", status=200, ms=3.1)

    assert terminal.format(request) == "12:00:05 GET /v1/jobs\\x1b 200 3.1 ms"
    assert terminal.format(said_of("it failed", logging.WARNING, run_id="R")) == (
        "12:00:05 warning it failed run_id=R"
    )


def test_a_terminal_is_coloured_by_what_a_line_says() -> None:
    coloured = TextFormatter(for_terminal=True, coloured=True)
    ended = said_of("task ended", **ENDED)

    assert "\x1b[33mfailed\x1b[0m 312 ms" in coloured.format(ended)
    assert "\x1b[32msuccessful\x1b[0m" in coloured.format(
        said_of("task ended", **{**ENDED, "state": "successful"})
    )
    assert "\x1b[31mbroken\x1b[0m" in coloured.format(said_of("broken", logging.ERROR))
    assert "\x1b" not in coloured.format(said_of("request", method="GET", path="/", status=200))


@pytest.mark.parametrize(
    ("variables", "allowed"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True), ({"TERM": "dumb"}, False)],
)
def test_colour_can_be_turned_off(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], allowed: bool
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert colour_allowed() is allowed
