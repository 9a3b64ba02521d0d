"""Answers to the scrapes of a test's own URLs, as rules of the fake gateway."""

from __future__ import annotations

import json as json_text
from base64 import urlsafe_b64encode
from typing import Any
from urllib.parse import urlsplit

import msgspec

from conveyor.domain.errors import ConveyorError
from conveyor.gateway.fake import key_digest
from conveyor.http.routes_dev import CALLS_PATH, RULES_PATH
from conveyor.ports.gateway import GatewayCall, GatewayCalls
from conveyor.testing.dev_routes import DevRoutes


class ServerGateway:
    """The fake gateway of a server: its rules, in the order in which a test made them, and its
    calls. The first rule that is for a call answers it; the default comes last."""

    def __init__(self, routes: DevRoutes) -> None:
        self._routes = routes
        self._rules: list[AnswerRule] = []
        self._default: AnswerRule | None = None

    def when(self, url: str, *, method: str = "") -> AnswerRule:
        """Return a rule for the URLs like `url`, in whose host and path `*` stands for any
        characters, and for one method or all; it answers from `respond` on. Raises ValueError for
        what is no such pattern."""
        return AnswerRule(self, url, method)

    def otherwise(self, **answer: Any) -> AnswerRule:
        """Answer so what no rule is for, also URLs of `url()`; without it, scrapes of such are
        answered as their URLs ask, and others with a small page."""
        return AnswerRule(self, "*", "").respond(**answer)

    @property
    def rules(self) -> list[dict[str, Any]]:
        """Return the rules, as `PUT /_dev/gateway/rules` takes them."""
        return [rule.document() for rule in self._in_order()]

    @property
    def calls(self) -> list[GatewayCall]:
        """Return the last 1,000 calls, oldest first."""
        return self._look().requests

    def digest(self, secret: str) -> str:
        """Return what a call shows of a secret, such as the value of the header Authorization."""
        return f"sha256:{key_digest(secret)}"

    def assert_all_called(self) -> None:
        """Raise AssertionError unless each rule but the default has answered a call."""
        self.note_calls()
        silent = [str(rule) for rule in self._rules if not rule.called]
        if silent:
            raise AssertionError(f"no call came for {', '.join(silent)}")

    def add(self, rule: AnswerRule) -> None:
        """Follow a rule; or once more, when its answers have changed. Raises ConveyorError for an
        answer that cannot be, and follows the rules before it."""
        self.note_calls()
        rules, default = list(self._rules), self._default
        if rule.is_default:
            self._default = rule
        elif rule not in self._rules:
            self._rules.append(rule)
        try:
            # New rules begin anew, so each has only those answers that it has not given yet.
            self._routes.send("PUT", RULES_PATH, {"rules": self.rules})
        except ConveyorError:
            self._rules, self._default = rules, default
            raise
        for each in self._in_order():
            each.begin()

    def note_calls(self) -> None:
        """Take over how many calls each rule has answered."""
        if self._in_order():
            for rule, counted in zip(self._in_order(), self._look().rules, strict=False):
                rule.note(counted.calls)

    def forget(self) -> None:
        """Forget the rules: the server has been reset."""
        self._rules.clear()
        self._default = None

    def _in_order(self) -> list[AnswerRule]:
        return self._rules if self._default is None else [*self._rules, self._default]

    def _look(self) -> GatewayCalls:
        return msgspec.convert(self._routes.send("GET", CALLS_PATH), GatewayCalls)


class AnswerRule:
    """A rule: the URLs that it is for, and its answers in their order, of which the last stays."""

    def __init__(self, gateway: ServerGateway, url: str, method: str) -> None:
        self._gateway = gateway
        self._where = _pattern(url)
        self._method = method.upper()
        self._url = url
        self._answers: list[dict[str, Any]] = []
        self._before = 0
        self._now = 0

    def __str__(self) -> str:
        return f"{self._method} {self._url}".strip()

    @property
    def is_default(self) -> bool:
        """Tell whether the rule is for all calls."""
        return self._url == "*" and not self._method

    @property
    def called(self) -> int:
        """Return how many calls the rule had answered when that was last looked up."""
        return self._before + self._now

    @property
    def call_count(self) -> int:
        """Return how many calls the rule has answered."""
        self._gateway.note_calls()
        return self.called

    def respond(self, status: int = 200, *, times: int = 1, **words: Any) -> AnswerRule:
        """Answer with a status, `times` calls in a row, and with `body` (text or bytes), `json`,
        `type`, `delay`, `retry_after`, `hang`, `reset` or another word of the fake gateway.

        Raises ConveyorError(invalid_argument) for a word or value that it does not have, ValueError
        for a rule that has answers.
        """
        if self._answers:
            raise ValueError(f"{self} has answers: then() adds to them")
        return self.then(status, times=times, **words)

    def then(self, status: int = 200, *, times: int = 1, **words: Any) -> AnswerRule:
        """Answer so after the answers before it; takes the words of `respond`."""
        before = self._answers
        self._answers = [*before, {"status": status, "times": times, **_words(words)}]
        try:
            self._gateway.add(self)
        except ConveyorError:
            self._answers = before
            raise
        return self

    def document(self) -> dict[str, Any]:
        """Return the rule with the answers that it has still to give."""
        answers, given = [], self.called
        for answer in self._answers:
            left = answer["times"] - given
            given = max(given - answer["times"], 0)
            if left > 0:
                answers.append({**answer, "times": left})
        rule = {**self._where, "answers": answers or [self._answers[-1]]}
        return {**rule, "method": self._method} if self._method else rule

    def note(self, calls: int) -> None:
        """Note how many calls the server counts since it has followed the rule."""
        self._now = calls

    def begin(self) -> None:
        """Note that the server counts from 0 again."""
        self._before, self._now = self.called, 0


def _pattern(url: str) -> dict[str, str]:
    """Split a pattern of URLs. Raises ValueError."""
    if url == "*":
        return {"host": "*", "path": "*"}
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.query or parts.fragment:
        raise ValueError(f"when() takes a URL such as https://shop.example/p/*, not {url!r}")
    return {"host": parts.netloc.lower(), "path": parts.path or "*"}


def _words(words: dict[str, Any]) -> dict[str, Any]:
    """Turn bodies in bytes and JSON into words of the gateway."""
    made = dict(words)
    if "json" in made:
        made["body"] = json_text.dumps(made.pop("json"))
        made.setdefault("type", "application/json")
    if isinstance(made.get("body"), bytes):
        made["body64"] = urlsafe_b64encode(made.pop("body")).decode()
    return made
