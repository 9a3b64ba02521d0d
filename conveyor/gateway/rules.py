"""The rules of the fake gateway, read from a document in TOML or JSON.

    [[rules]]
    host = "shop.example"
    path = "/p/*"
    answers = [{status = 503, times = 2}, {body_file = "page.html"}]

Pure but for the files of bodies, which a function of the caller's reads.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, cast

import msgspec

from conveyor.domain import strict_json
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.text_rules import is_retry_after, parse_duration, quoted
from conveyor.gateway.fake import MAX_SIZE, PLAIN, Behaviour, behaviour_of, is_understood
from conveyor.gateway.redaction import USUAL_NAMES, SecretNames
from conveyor.gateway.refusals import read_amount

MOST_RULES = 1_000
MOST_ANSWERS = 1_000
"""Answers of one rule."""
MOST_TIMES = 1_000_000
MOST_NAMES = 1_000
"""Names in one list of `redact`."""
MOST_TEXT = 1 << 20
"""Bytes of a document."""
MOST_BODIES = 1 << 26
"""Bytes of all files of bodies together."""
LONGEST_PATTERN = 2_048
LONGEST_ID = 64
"""Characters of the id of a rule."""
WIDEST_SPREAD = 3.0
LONGEST_LATENCY = 86_400.0

ANSWER_WORDS = (*Behaviour.__struct_fields__, "body_file")
RULE_WORDS = ("id", "host", "path", "method", "share", "latency", "answers")
TOP_WORDS = ("rules", "seed", "redact")

ReadBody = Callable[[str], bytes]
"""Reads the file of a body by its name. Raises ValueError with the reason why not."""


class AnswerLatency(msgspec.Struct, frozen=True):
    """The time that answers take, in seconds: half of them `median` at most, spread about it by a
    logarithmic normal distribution whose sigma is `spread`."""

    median: float
    spread: float = 0.0


class RuleAnswer(msgspec.Struct, frozen=True):
    """An answer that is given `times` times in a row; `content`, if there is any, is its body."""

    behaviour: Behaviour = PLAIN
    content: bytes | None = None
    times: int = 1


class Rule(msgspec.Struct, frozen=True):
    """The calls that a rule is for, by globs of host and path and by method, and its answers in
    their order, of which the last one stays. It takes a `share` of these calls. By its `id` it is
    known when rules are put once more."""

    id: str = ""
    host: str = "*"
    path: str = "*"
    method: str = ""
    share: float = 1.0
    latency: AnswerLatency | None = None
    answers: tuple[RuleAnswer, ...] = (RuleAnswer(),)


class GatewayRules(msgspec.Struct, frozen=True):
    """Rules in their order: the first one that is for a call answers it. `seed` decides about
    shares and latencies; `redact` names further secrets."""

    rules: tuple[Rule, ...] = ()
    seed: int = 0
    redact: SecretNames = USUAL_NAMES


NO_RULES = GatewayRules()


_Place = tuple[str | int, ...]


class _Wrong(Exception):
    """A word that cannot be used, by its place in the document, and why."""

    def __init__(self, place: _Place, reason: str) -> None:
        super().__init__(reason)
        self.place = place
        self.reason = reason

    @property
    def told(self) -> str:
        steps = [
            f"[{step}]" if isinstance(step, int) else f".{quoted(step)}" for step in self.place
        ]
        where = "".join(steps).removeprefix(".")
        return f"{where}: {self.reason}" if where else self.reason


# -- documents --


def rules_of_toml(text: str, name: str, read_body: ReadBody) -> GatewayRules:
    """Read rules in TOML from the file `name`. Raises ConveyorError(invalid_argument), which names
    file, line, word and reason."""
    if len(text) > MOST_TEXT:
        _refuse(f"{name}: more than {MOST_TEXT:,} characters")
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        _refuse(_not_toml(name, str(error)))
    try:
        return parse_rules(document, read_body)
    except _Wrong as wrong:
        _refuse(f"{name}, line {_line_of(text, wrong.place)}: {wrong.told}")


def rules_of_json(body: bytes, read_body: ReadBody) -> GatewayRules:
    """Read rules in JSON. Raises ConveyorError(invalid_argument), which names word and reason."""
    document = strict_json.decode(body)
    if not isinstance(document, dict):
        _refuse('send an object such as {"rules": [{"host": "shop.example", "status": 503}]}')
    try:
        return parse_rules(document, read_body)
    except _Wrong as wrong:
        _refuse(wrong.told)


_WHERE = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")


def _not_toml(name: str, told: str) -> str:
    where = _WHERE.search(told)
    line = f", line {where[1]}" if where is not None and where[1] else ""
    return f"{name}{line}: is not TOML: {_WHERE.sub('', told)}"


_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}'
    r"|'''.*?'{3,5}"
    r'|"(?:\\.|[^"\\])*"'
    r"|'[^']*'"
    r"|#[^\n]*"
    r"|[\n\[\]{},=]"
    r"|[^\s\"'#\[\]{},=.]+",
    re.DOTALL,
)
_DEEPEST = 8
"""Names of a place that are looked at, more than any word of a document of rules has."""


def _line_of(text: str, place: _Place) -> int:
    """Return the line on which a word begins, or else the innermost part around it."""
    steps, found = 0, 1
    for line, other in _Places().read(text):
        if len(other) > steps and place[: len(other)] == other:
            steps, found = len(other), line
    return found


class _Places:
    """The places of all that stands in a document of valid TOML, found in one pass."""

    def __init__(self) -> None:
        self._table: _Place = ()
        self._lengths: dict[_Place, int] = {}
        self._names: list[str] = []
        self._brackets = 0
        # The open lists, with the place of their next item, and tables, whose items have names.
        self._open: list[tuple[_Place, int | None]] = []
        self._value: _Place | None = None

    def read(self, text: str) -> Iterator[tuple[int, _Place]]:
        """Yield each place with its line; some more than once."""
        line = 1
        for match in _TOKEN.finditer(text):
            token = match[0]
            if not token.startswith("#"):
                place = self._name(token) if self._value is None else self._part(token)
                if place is not None:
                    yield line, place
            line += token.count("\n")

    def _name(self, token: str) -> _Place | None:
        """Take a part of a name or of a header; return the place that it completes."""
        if token == "=":
            self._value = (*(self._open[-1][0] if self._open else self._table), *self._taken())
            return self._value
        if token == "}":
            self._value, _ = self._open.pop()
        elif token == "[":
            self._brackets += 1
        elif token == "]" and self._names:
            self._table = self._header()
            self._brackets = 0
            return self._table
        elif token not in (",", "\n", "]"):
            self._names.append(token.strip("\"'"))
        return None

    def _part(self, token: str) -> _Place | None:
        """Take a part of a value; return the place of what begins there."""
        value = self._value
        assert value is not None
        if token == "\n":
            self._value = value if self._open else None
        elif token == ",":
            place, number = self._open.pop()
            number = None if number is None else number + 1
            self._open.append((place, number))
            self._value = None if number is None else (*place, number)
        elif token in "]}":
            self._value, _ = self._open.pop()
        elif token in "[{":
            self._open.append((value, 0 if token == "[" else None))
            self._value = (*value, 0) if token == "[" else None
            return value
        else:
            return value
        return None

    def _header(self) -> _Place:
        """Return the place of a table by its header; one with two brackets is a list's next."""
        place: _Place = ()
        *outer, last = self._taken()
        for name in outer:
            place = (*place, name)
            if place in self._lengths:
                place = (*place, self._lengths[place] - 1)
        place = (*place, last)
        if self._brackets == 1:
            return place
        self._lengths[place] = self._lengths.get(place, 0) + 1
        return (*place, self._lengths[place] - 1)

    def _taken(self) -> list[str]:
        names, self._names = self._names[:_DEEPEST], []
        return names


def parse_rules(document: Mapping[str, Any], read_body: ReadBody) -> GatewayRules:
    """Turn a decoded document into rules. Raises _Wrong at the first word that cannot be used."""
    _check_words(document, TOP_WORDS, ())
    listed = _list(document.get("rules", []), ("rules",), MOST_RULES)
    left = [MOST_BODIES]

    def read_bounded(name: str) -> bytes:
        content = read_body(name)
        left[0] -= len(content)
        if left[0] < 0:
            raise ValueError(f"all files of bodies together may have {MOST_BODIES:,} bytes")
        return content

    rules = tuple(_rule(given, ("rules", n), read_bounded) for n, given in enumerate(listed))
    ids: set[str] = set()
    for place, rule in enumerate(rules):
        if rule.id and rule.id in ids:
            raise _Wrong(("rules", place, "id"), "another rule has this id")
        ids.add(rule.id)
    return GatewayRules(
        rules=rules,
        seed=_whole(document.get("seed", 0), ("seed",), 0, 2**63 - 1),
        redact=_redact(document.get("redact", {})),
    )


# -- parts --


def _rule(given: object, place: _Place, read_body: ReadBody) -> Rule:
    table = _table(given, place)
    has_answers = "answers" in table
    _check_words(table, RULE_WORDS if has_answers else (*RULE_WORDS, *ANSWER_WORDS), place)
    if has_answers:
        listed = _list(table["answers"], (*place, "answers"), MOST_ANSWERS)
        if not listed:
            raise _Wrong((*place, "answers"), "needs one at least")
        answers = tuple(
            _answer(answer, (*place, "answers", number), read_body)
            for number, answer in enumerate(listed)
        )
    else:
        words = {word: value for word, value in table.items() if word in ANSWER_WORDS}
        answers = (_answer(words, place, read_body),)
    return Rule(
        id=_id(table["id"], (*place, "id")) if "id" in table else "",
        host=_pattern(table.get("host", "*"), (*place, "host")).lower(),
        path=_pattern(table.get("path", "*"), (*place, "path")),
        method=_method(table.get("method", ""), (*place, "method")),
        share=_fraction(table.get("share", 1.0), (*place, "share")),
        latency=_latency(table["latency"], (*place, "latency")) if "latency" in table else None,
        answers=answers,
    )


def _answer(given: object, place: _Place, read_body: ReadBody) -> RuleAnswer:
    table = _table(given, place)
    _check_words(table, (*ANSWER_WORDS, "times"), place)
    bodies = [word for word in ("body", "body64", "body_file", "size", "echo") if word in table]
    if len(bodies) > 1:
        raise _Wrong((*place, bodies[1]), f"{bodies[0]} gives the body already")
    content = None
    if "body_file" in table:
        name = _text(table["body_file"], (*place, "body_file"))
        try:
            content = read_body(name)
        except ValueError as error:
            raise _Wrong((*place, "body_file"), str(error)) from None
    words = [
        (word, _word(word, value, (*place, word)))
        for word, value in table.items()
        if word not in ("times", "body_file")
    ]
    times = _whole(table.get("times", 1), (*place, "times"), 1, MOST_TIMES)
    return RuleAnswer(behaviour_of(words), content, times)


def _word(word: str, value: object, place: _Place) -> str:
    """Return the text of a word, as it would stand in a URL."""
    is_flag = isinstance(getattr(PLAIN, word), bool)
    # Python refuses to write out a whole number of too many digits.
    if isinstance(value, int) and abs(value) > _HUGE:
        raise _Wrong(place, _EXPECTED.get(word, "takes a number of at most 300 digits"))
    text = str(int(value)) if isinstance(value, bool) else str(value)
    is_simple = isinstance(value, str | int | float) and isinstance(value, bool) <= is_flag
    # A reset is a word that is also spelt as a number.
    if word == "reset" and value is True:
        return "1"
    is_text = isinstance(value, str) or is_flag or word in _EXPECTED
    if not is_simple or not is_text or not is_understood(word, text) or not _is_field(word, text):
        raise _Wrong(
            place, _EXPECTED.get(word, "takes true or false" if is_flag else "takes a text")
        )
    return text


def _is_field(word: str, text: str) -> bool:
    """Return whether the text of a header is one that is read; an empty one sends no header."""
    if not text or word not in ("retry_after", "cost", "credits"):
        return True
    return is_retry_after(text) if word == "retry_after" else read_amount(text) is not None


_EXPECTED = {
    "status": "takes a status from 200 to 599",
    "flaky": "takes a whole number from 0 to 1,000,000",
    "delay": "takes seconds from 0 to 1,000,000",
    "size": f"takes bytes from 0 to {MAX_SIZE:,}",
    "body64": "takes URL-safe base 64",
    "reset": 'takes "1" or "body"',
    "retry_after": "takes whole seconds, or an HTTP date",
    "cost": "takes an amount from 0",
    "credits": "takes an amount from 0",
}


def _latency(given: object, place: _Place) -> AnswerLatency:
    table = _table(given, place)
    _check_words(table, ("median", "spread"), place)
    if "median" not in table:
        raise _Wrong(place, "needs a median, such as {median = 0.2, spread = 0.5}")
    try:
        median = parse_duration(table["median"])
    except (ValueError, OverflowError):
        reason = "takes seconds, or a duration such as 200ms or 1.5s"
        raise _Wrong((*place, "median"), reason) from None
    if not 0 <= median <= LONGEST_LATENCY:
        raise _Wrong((*place, "median"), "takes 0 seconds to a day")
    spread = _number(table.get("spread", 0.0), (*place, "spread"))
    if not 0 <= spread <= WIDEST_SPREAD:
        raise _Wrong((*place, "spread"), f"takes a number from 0 to {WIDEST_SPREAD:g}")
    return AnswerLatency(median, spread)


def _redact(given: object) -> SecretNames:
    table = _table(given, ("redact",))
    _check_words(table, ("headers", "query"), ("redact",))
    names: dict[str, tuple[str, ...]] = {}
    for word in ("headers", "query"):
        place = ("redact", word)
        listed = _list(table.get(word, []), place, MOST_NAMES)
        names[word] = tuple(_text(name, (*place, n)) for n, name in enumerate(listed))
    return SecretNames(**names)


def _check_words(table: Mapping[str, Any], known: Iterable[str], place: _Place) -> None:
    for word in table:
        if word not in known:
            raise _Wrong((*place, word), f"is none of {', '.join(sorted(known))}")


def _table(given: object, place: _Place) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise _Wrong(place, "takes a table")
    return cast("dict[str, Any]", given)


def _list(given: object, place: _Place, most: int) -> list[Any]:
    if not isinstance(given, list):
        raise _Wrong(place, "takes a list")
    if len(given) > most:
        raise _Wrong(place, f"takes {most:,} at most")
    return given


def _text(given: object, place: _Place) -> str:
    if not isinstance(given, str) or not given:
        raise _Wrong(place, "takes a text that is not empty")
    return given


def _pattern(given: object, place: _Place) -> str:
    text = _text(given, place)
    if len(text) > LONGEST_PATTERN:
        raise _Wrong(place, f"takes {LONGEST_PATTERN:,} characters at most")
    return text


def _id(given: object, place: _Place) -> str:
    text = _text(given, place)
    if len(text) > LONGEST_ID:
        raise _Wrong(place, f"takes {LONGEST_ID} characters at most")
    return text


_METHOD = re.compile(r"[A-Za-z]{0,16}")


def _method(given: object, place: _Place) -> str:
    if not isinstance(given, str) or _METHOD.fullmatch(given) is None:
        raise _Wrong(place, "takes a method, such as GET")
    return given.upper()


_HUGE = 10**300


def _number(given: object, place: _Place) -> float:
    if isinstance(given, int | float) and not isinstance(given, bool) and abs(given) < math.inf:
        return float(min(max(given, -_HUGE), _HUGE))
    raise _Wrong(place, "takes a number")


def _fraction(given: object, place: _Place) -> float:
    number = _number(given, place)
    if not 0 <= number <= 1:
        raise _Wrong(place, "takes a number from 0 to 1")
    return number


def _whole(given: object, place: _Place, low: int, high: int) -> int:
    if not isinstance(given, int) or isinstance(given, bool) or not low <= given <= high:
        raise _Wrong(place, f"takes a whole number from {low:,} to {high:,}")
    return given


# -- files of bodies --


def body_reader(directory: Path | None) -> ReadBody:
    """Return what reads files of bodies within a directory; without one, what refuses them."""

    def read(name: str) -> bytes:
        if directory is None:
            raise ValueError("needs a file of rules, whose directory has the bodies")
        try:
            root = directory.resolve()
            path = (root / name).resolve()
            if not path.is_relative_to(root):
                raise ValueError("is outside of the directory of the rules")
            if not path.is_file():
                raise ValueError("is no file in the directory of the rules")
            if path.stat().st_size > MOST_BODIES:
                raise ValueError(f"may have at most {MOST_BODIES:,} bytes")
            return path.read_bytes()
        except OSError as error:
            raise ValueError(f"cannot be read: {error.strerror}") from None
        except RuntimeError:
            raise ValueError("cannot be read: its links lead in a circle") from None

    return read


def _refuse(detail: str) -> NoReturn:
    raise ConveyorError(ErrorCode.INVALID_ARGUMENT, detail)
