"""Answers to the scrapes of a test's own URLs, as rules of the fake gateway."""

from __future__ import annotations

import json as json_text
import re
from base64 import urlsafe_b64encode
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.gateway.fake import key_digest
from conveyor.http.routes_dev import CALLS_PATH, RECORDING_PATH, RULES_PATH
from conveyor.ports.gateway import GatewayCall, GatewayCalls
from conveyor.ports.recordings import RecordingState
from conveyor.testing.dev_routes import DevRoutes


class ServerGateway:
    """The fake gateway of a server: its rules, in the order in which a test made them, and its
    calls. The first rule that is for a call answers it; the default comes last."""

    def __init__(self, routes: DevRoutes) -> None:
        self._routes = routes
        self._rules: list[AnswerRule] = []
        self._default: AnswerRule | None = None
        self._made = 0

    def when(self, url: str, *, method: str = "") -> AnswerRule:
        """Return a rule for the URLs like `url`, in whose host and path `*` stands for any
        characters, and for one method or all; it has its place from now on, and answers from
        `respond` on. Raises ValueError for what is no such pattern."""
        rule = self._rule(url, method)
        self._rules.append(rule)
        return rule

    def otherwise(self, **answer: Any) -> AnswerRule:
        """Answer so what no rule is for, also URLs of `url()`; without it, scrapes of such are
        answered as their URLs ask, and others with a small page."""
        before, self._default = self._default, self._rule("*", "")
        try:
            return self._default.respond(**answer)
        except BaseException:
            self._default = before
            raise

    @property
    def rules(self) -> list[dict[str, Any]]:
        """Return the rules that have answers, as `PUT /_dev/gateway/rules` takes them."""
        return [rule.document() for rule in self._answering()]

    @property
    def calls(self) -> list[GatewayCall]:
        """Return the last 1,000 calls, oldest first."""
        return self._look().requests

    def digest(self, secret: str) -> str:
        """Return what a call shows of a secret, such as the value of the header Authorization."""
        return f"sha256:{key_digest(secret)}"

    def record(self, directory: Path | str) -> None:
        """Write down from now on what the gateway answers, into a new directory; what was recorded
        or replayed ends. Raises ConveyorError: invalid_argument for a directory that cannot be
        recorded into, conflict while calls of a recording are under way."""
        self._routes.send("PUT", RECORDING_PATH, {"record": str(Path(directory).absolute())})

    def replay(self, directory: Path | str, *, missing: str = "fail") -> None:
        """Answer from a recording from now on; what was recorded or replayed ends. A call that it
        does not have fails, or is made (`missing="pass"`), or is made and added ("record"). Raises
        ConveyorError as `record` does."""
        asked = {"replay": str(Path(directory).absolute()), "missing": missing}
        self._routes.send("PUT", RECORDING_PATH, asked)

    def end_recording(self) -> RecordingState:
        """End what was recorded or replayed since the start of the server, and return what there is
        to say of it: how many answers were `withheld`, and of which `hosts`. A recording is whole
        from then on. Raises ConveyorError(conflict) while calls of it are under way."""
        return msgspec.convert(self._routes.send("DELETE", RECORDING_PATH), RecordingState)

    def assert_all_called(self) -> None:
        """Raise AssertionError unless each rule but the default has answered a call."""
        counts = self.counts()
        silent = [str(rule) for rule in self._rules if not counts.get(rule.id)]
        if silent:
            raise AssertionError(f"no call came for {', '.join(silent)}")

    def follow(self) -> None:
        """Follow the rules as they are now; the server knows by its id how far each has come.
        Raises ConveyorError for an answer that cannot be, and follows the rules before it."""
        self._routes.send("PUT", RULES_PATH, {"rules": self.rules})

    def check(self, rule: AnswerRule) -> None:
        """Raise ValueError for a rule that was made before the server was reset, or that another
        call of `otherwise` has replaced."""
        if rule is not self._default and rule not in self._rules:
            why = "the server was reset, or otherwise() has replaced the rule"
            raise ValueError(f"{rule}: {why}: call when() or otherwise() again")

    def counts(self) -> dict[str, int]:
        """Return how many calls each rule that has answers has answered, by its id."""
        counted = (each.calls for each in self._look().rules)
        return dict(zip((rule.id for rule in self._answering()), counted, strict=False))

    def forget(self) -> None:
        """Forget the rules: the server has been reset."""
        self._rules.clear()
        self._default = None

    def _rule(self, url: str, method: str) -> AnswerRule:
        self._made += 1
        return AnswerRule(self, url, method, str(self._made))

    def _answering(self) -> list[AnswerRule]:
        default = [] if self._default is None else [self._default]
        return [rule for rule in (*self._rules, *default) if rule.has_answers]

    def _look(self) -> GatewayCalls:
        return msgspec.convert(self._routes.send("GET", CALLS_PATH), GatewayCalls)


class AnswerRule:
    """A rule: the URLs that it is for, and its answers in their order, of which the last stays."""

    def __init__(self, gateway: ServerGateway, url: str, method: str, rule_id: str) -> None:
        self._gateway = gateway
        self._where = _pattern(url)
        self._method = method.upper()
        self._url = url
        self._answers: list[dict[str, Any]] = []
        self.id = rule_id

    def __str__(self) -> str:
        return f"{self._method} {self._url}".strip()

    @property
    def has_answers(self) -> bool:
        """Tell whether `respond` was called."""
        return bool(self._answers)

    @property
    def call_count(self) -> int:
        """Return how many calls the rule has answered. Raises ValueError after a reset."""
        self._gateway.check(self)
        return self._gateway.counts().get(self.id, 0)

    def respond(self, status: int = 200, *, times: int = 1, **words: Any) -> AnswerRule:
        """Answer with a status, `times` calls in a row, and with `body` (text or bytes), `json`,
        `type`, `delay`, `retry_after`, `hang`, `reset` or another word of the fake gateway.

        Raises ConveyorError(invalid_argument) for a word or value that it does not have, ValueError
        for a rule that has answers, or was made before a reset.
        """
        if self._answers:
            raise ValueError(f"{self} has answers: then() adds to them")
        return self.then(status, times=times, **words)

    def then(self, status: int = 200, *, times: int = 1, **words: Any) -> AnswerRule:
        """Answer so after the answers before it; takes the words of `respond`."""
        self._gateway.check(self)
        before = self._answers
        self._answers = [*before, {"status": status, "times": times, **_words(words)}]
        try:
            self._gateway.follow()
        except BaseException:
            self._answers = before
            raise
        return self

    def document(self) -> dict[str, Any]:
        """Return the rule as the server takes it."""
        rule = {"id": self.id, **self._where, "answers": self._answers}
        return {**rule, "method": self._method} if self._method else rule


_NEVER_SENT = re.compile(r"[\x00-\x1f\x7f]|^ | $")
"""Characters that no URL of a task has: a pattern with one is for no call."""


def _pattern(url: str) -> dict[str, str]:
    """Split a pattern of URLs. Raises ValueError."""
    if not isinstance(url, str):
        raise TypeError(f"when() takes a text, not {type(url).__name__}")
    if url == "*":
        return {"host": "*", "path": "*"}
    parts = urlsplit(url)
    is_known = parts.scheme in ("http", "https") and parts.netloc
    if not is_known or parts.query or parts.fragment or _NEVER_SENT.search(url):
        raise ValueError(f"when() takes a URL such as https://shop.example/p/*, not {url!r}")
    return {"host": parts.netloc.lower(), "path": parts.path or "*"}


def _words(words: dict[str, Any]) -> dict[str, Any]:
    """Turn bodies in bytes and JSON into words of the gateway. Raises ConveyorError."""
    made = dict(words)
    if "json" in made:
        if "body" in made:
            raise ConveyorError(ErrorCode.INVALID_ARGUMENT, "json gives the body already")
        made["body"] = json_text.dumps(made.pop("json"))
        made.setdefault("type", "application/json")
    if isinstance(made.get("body"), bytes):
        made["body64"] = urlsafe_b64encode(made.pop("body")).decode()
    return made
