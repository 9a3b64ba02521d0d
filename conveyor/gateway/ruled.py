"""The fake gateway under rules: what no rule is for is answered as its URL asks."""

from __future__ import annotations

import logging
import math
import os
import re
import stat
from bisect import bisect_right
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from fnmatch import translate
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote_plus, urlsplit

import msgspec
from anyio.to_thread import run_sync

from conveyor.aio.log_output import NEWS
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import TaskBody
from conveyor.domain.text_rules import rfc3339
from conveyor.gateway.fake import Behaviour, FakeGateway, key_digest
from conveyor.gateway.headers import custom_headers
from conveyor.gateway.redaction import (
    SecretNames,
    is_form_in_parts,
    replaced_in_form,
    secrets_of,
)
from conveyor.gateway.refusals import may_hold, places_of
from conveyor.gateway.rules import (
    MOST_TEXT,
    NO_RULES,
    GatewayRules,
    Rule,
    body_reader,
    rules_of_json,
    rules_of_toml,
)
from conveyor.ports.clock import Clock
from conveyor.ports.gateway import (
    GatewayCall,
    GatewayCalls,
    GatewayControl,
    RuleCalls,
    ScrapeFailed,
    ScrapeRequest,
    Success,
)

MOST_CALLS = 1_000
"""Calls that are kept."""
MOST_CALL_BYTES = 8 << 20
"""Characters of URLs, params, headers and bodies of the kept calls together."""
LONGEST_BODY = 65_536
MOST_URLS = 100_000
"""URLs whose calls are counted one by one, for what depends on their number."""
MOST_HOSTS = 1_000
LOOK_EVERY = 1.0
"""Seconds between two looks at the file of the rules."""
SETTLES_IN = 0.05
"""Seconds in which a file must not change before it is read: it may be half written."""
_DEFAULT_PORTS = {"http": 80, "https": 443}

_log = logging.getLogger("conveyor.gateway")


class _Target(NamedTuple):
    """The parts of a URL that rules look at."""

    host: str
    place: str
    path: str


def _target(url: str) -> _Target:
    try:
        parts = urlsplit(url)
        port = parts.port or _DEFAULT_PORTS.get(parts.scheme, 0)
    except ValueError:
        return _Target("", "", "")
    host = parts.hostname or ""
    return _Target(host, f"{host}:{port}", parts.path or "/")


class _Answer(NamedTuple):
    """The answer of a rule to a call, before which `before` calls of its URL came."""

    rule: int
    behaviour: Behaviour
    content: bytes | None
    before: int


class _RuleInUse:
    """A rule and the number of calls that it has answered."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.calls = 0
        self._host = re.compile(translate(rule.host))
        self._names_port = ":" in rule.host
        self._path = re.compile(translate(rule.path))
        self._ends = list(accumulate(answer.times for answer in rule.answers))

    def is_for(self, method: str, target: _Target) -> bool:
        rule = self.rule
        if rule.method and rule.method != method:
            return False
        if rule.host != "*" and not self._host.match(
            target.place if self._names_port else target.host
        ):
            return False
        return rule.path == "*" or self._path.match(target.path) is not None

    def take(self) -> tuple[Behaviour, bytes | None]:
        """Count a call, and return its answer; the last one stays."""
        place = min(bisect_right(self._ends, self.calls), len(self._ends) - 1)
        self.calls += 1
        answer = self.rule.answers[place]
        return answer.behaviour, answer.content


class _RulesInUse:
    """Rules and how far each has come."""

    def __init__(self, rules: GatewayRules) -> None:
        self.rules = rules
        self.each = [_RuleInUse(rule) for rule in rules.rules]
        self._before: dict[tuple[str, str], int] = {}
        self._calls = 0

    def go_on_from(self, earlier: _RulesInUse) -> None:
        """Take over the counts of rules with the same ids, to whose answers some may have been
        added at the end."""
        known = {each.rule.id: each for each in earlier.each if each.rule.id}
        for each in self.each:
            before = known.get(each.rule.id)
            if before is None:
                continue
            answers = before.rule.answers
            if each.rule.answers[: len(answers)] == answers:
                each.calls = before.calls
                self._before, self._calls = earlier._before, earlier._calls

    def answer(self, request: ScrapeRequest) -> _Answer | None:
        """Return the answer of the first rule that is for a call and takes it."""
        if not self.each:
            return None
        target, before = _target(request.url), self._count(request)
        for place, each in enumerate(self.each):
            if not each.is_for(request.method, target):
                continue
            share, latency = each.rule.share, each.rule.latency
            if share < 1 and self._chance("share", place, request, before) >= share:
                continue
            behaviour, content = each.take()
            if latency is not None:
                drawn = [self._chance(word, place, request, before) for word in ("near", "far")]
                normal = math.sqrt(-2 * math.log(1 - drawn[0])) * math.cos(math.tau * drawn[1])
                seconds = latency.median * math.exp(latency.spread * normal)
                delay = behaviour.delay + seconds
                behaviour = msgspec.structs.replace(behaviour, delay=delay)
            return _Answer(place, behaviour, content, before)
        return None

    def _count(self, request: ScrapeRequest) -> int:
        """Count a call; return how many of its URL came before, or of all if there are too many."""
        key = (request.method, request.url)
        before = self._before.get(key, 0)
        if before or len(self._before) < MOST_URLS:
            self._before[key] = before + 1
            return before
        self._calls += 1
        return MOST_URLS + self._calls

    def _chance(self, word: str, place: int, request: ScrapeRequest, before: int) -> float:
        """Return a number in [0, 1) that depends on the seed and on the call alone."""
        text = f"{self.rules.seed} {word} {place} {request.method} {before} {request.url}"
        digest = blake2b(text.encode("utf-8", "replace"), digest_size=6).digest()
        return int.from_bytes(digest) / 2**48


class RuledGateway(FakeGateway, GatewayControl):
    """The fake gateway, with rules that can change at any time: each call is answered by those at
    its start. Bodies of rules that are sent to it are read within `directory`."""

    def __init__(
        self,
        clock: Clock,
        *,
        retry_after_cap: float = 3_600.0,
        keeps_hits: bool = True,
        directory: Path | None = None,
    ) -> None:
        super().__init__(clock, retry_after_cap=retry_after_cap, keeps_hits=keeps_hits)
        self._read_body = body_reader(directory)
        self._first = NO_RULES
        self._used = _RulesInUse(NO_RULES)
        self._call_log = _CallLog()

    def follow(self, rules: GatewayRules) -> None:
        """Replace all rules by those that are there at the start, or after the calls are forgotten.

        Each rule begins anew.
        """
        self._first = rules
        self._used = _RulesInUse(rules)

    def names(self) -> SecretNames:
        """Return the names whose values are secret by the present rules."""
        return self._used.rules.redact

    def install(self, document: bytes, *, is_toml: bool) -> None:
        if is_toml:
            rules = rules_of_toml(_text(document, "rules"), "rules", self._read_body)
        else:
            rules = rules_of_json(document, self._read_body)
        used = _RulesInUse(rules)
        used.go_on_from(self._used)
        self._used = used

    def calls(self) -> GatewayCalls:
        rules = [
            RuleCalls(each.rule.host, each.rule.path, each.rule.method, each.calls)
            for each in self._used.each
        ]
        hits, noted = self.hits, self._call_log
        return GatewayCalls(
            hits.total,
            hits.in_flight,
            hits.peak_in_flight,
            rules,
            noted.hosts(),
            noted.shown(),
        )

    def forget(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all calls, and return to the rules of the start, which begin anew."""
        super().clear()
        self._call_log = _CallLog()
        self._used = _RulesInUse(self._first)

    def scrape(self, request: ScrapeRequest) -> AbstractAsyncContextManager[Success]:
        """Answer as the rules ask, or else the URL. Raises ScrapeFailed as the fake gateway."""
        answer = self._used.answer(request)
        names = self.names()
        self._call_log.note(
            request, None if answer is None else answer.rule, self._clock.now(), names
        )
        return super().scrape(request) if answer is None else self._ruled(request, answer)

    @asynccontextmanager
    async def _ruled(self, request: ScrapeRequest, answer: _Answer) -> AsyncIterator[Success]:
        given = custom_headers(request.params)
        self.hits.enter(request.url, request.method, tuple(given), request.api_key)
        try:
            yield await self._answer(request, answer.behaviour, answer.before, answer.content)
        finally:
            self.hits.leave()


def _text(document: bytes, name: str) -> str:
    try:
        return document.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = document.count(b"\n", 0, error.start) + 1
        detail = f"{name}, line {line}: is not UTF-8"
        raise ConveyorError(ErrorCode.INVALID_ARGUMENT, detail) from None


# -- the log of calls --

_PAIR = re.compile(r"([?&;#]|^)([^?=&;#]*)=([^&;#]*)")
_CREDENTIALS = re.compile(r"//([^/?#\s]*)@")
_MEMBER = re.compile(r'"([^"\\]{1,256})"(\s*:\s*)("(?:[^"\\]|\\.)*(?:"|\\?$)|[^\s",{}\[\]]+)')
_SHORTEST_KEY = 8
"""Characters of an API key that is looked for in all texts; a shorter one may be any word."""


_KEPT = r"sha256:[0-9a-f]{16}"
"""A digest, in which no secret is looked for."""


def _digest(value: str) -> str:
    return f"sha256:{key_digest(value)}"


class _NotedCall(NamedTuple):
    """A call as it was made, and the names whose values are shown as digests."""

    number: int
    request: ScrapeRequest
    rule: int | None
    at: int
    names: SecretNames

    @property
    def size(self) -> int:
        """Return about how many characters its listing has."""
        body, params = self.request.body, self.request.params
        pairs = sum(len(name) + len(value) for name, value in params.items())
        return len(self.request.url) + pairs + (0 if body is None else len(body.content))


class _CallLog:
    """The last calls, shown without secrets, and the number of calls of the first hosts.

    A call is only noted as it is made: looking for its secrets costs more than answering it.
    """

    def __init__(self) -> None:
        self._origins: dict[str, int] = {}
        self._noted: deque[_NotedCall] = deque()
        self._number = 0
        self._size = 0

    def note(self, request: ScrapeRequest, rule: int | None, now: int, names: SecretNames) -> None:
        """Keep a call, and drop the oldest ones that are too many."""
        self._number += 1
        origin = "/".join(request.url.split("/", 3)[:3])
        if origin in self._origins or len(self._origins) < MOST_HOSTS:
            self._origins[origin] = self._origins.get(origin, 0) + 1
        body = request.body
        if body is not None and len(body.content) > LONGEST_BODY:
            body = msgspec.structs.replace(body, content=body.content[:LONGEST_BODY])
            request = msgspec.structs.replace(request, body=body)
        call = _NotedCall(self._number, request, rule, now, names)
        self._noted.append(call)
        self._size += call.size
        while len(self._noted) > MOST_CALLS or self._size > MOST_CALL_BYTES:
            self._size -= self._noted.popleft().size

    def hosts(self) -> dict[str, int]:
        """Count the calls of each host, named with its port."""
        found: dict[str, int] = {}
        for origin, calls in self._origins.items():
            host = _target(origin).place
            found[host] = found.get(host, 0) + calls
        return found

    def shown(self) -> list[GatewayCall]:
        """Return the calls that are kept, without secrets."""
        return [_shown(*call) for call in self._noted]


def _shown(
    number: int, request: ScrapeRequest, rule: int | None, at: int, names: SecretNames
) -> GatewayCall:
    clean = _cleaner(request, names)

    def value_of(name: str, value: str) -> str:
        return _digest(value) if names.match(name) else clean(_without_secrets(value, names))

    try:
        headers = custom_headers(request.params) if "custom_headers" in request.params else {}
    except ScrapeFailed:
        headers = {}  # the call is refused for them
    body = request.body
    return GatewayCall(
        number=number,
        at=rfc3339(at),
        method=request.method,
        url=clean(_without_secrets(request.url, names)),
        params={
            name: value_of(name, value)
            for name, value in request.params.items()
            if name != "custom_headers"
        },
        headers={name: value_of(name, value) for name, value in headers.items()},
        body=None if body is None else clean(_body(body, names)),
        content_type=None if body is None else body.content_type,
        api_key=_digest(request.api_key),
        rule=rule,
    )


def _cleaner(request: ScrapeRequest, names: SecretNames) -> Callable[[str], str]:
    """Return what replaces the secrets of a request by their digests, wherever they stand in a
    text."""
    key = request.api_key
    secrets = secrets_of(request, names)
    if len(key) < _SHORTEST_KEY:
        secrets = tuple(secret for secret in secrets if secret != key)
    if not secrets:
        return str

    def shown(found: re.Match[str]) -> str:
        return found[0] if not found.lastindex else _digest(secrets[found.lastindex - 1])

    def clean(text: str) -> str:
        # To write the pattern costs more than to see that none is there.
        if not any(may_hold(secret, text) for secret in secrets):
            return text
        return places_of(secrets, _KEPT).sub(shown, text)

    return clean


def _without_secrets(text: str, names: SecretNames) -> str:
    """Replace by digests the credentials of a URL, and the values of its pairs that are secrets."""
    if "@" in text:
        text = _CREDENTIALS.sub(lambda found: f"//{_digest(found[1])}@", text)
    if "=" not in text:
        return text

    def pair(found: re.Match[str]) -> str:
        mark, name, value = found.groups()
        is_secret = value and names.match(unquote_plus(name).strip())
        return f"{mark}{name}={_digest(value) if is_secret else value}"

    return _PAIR.sub(pair, text)


def _body(body: TaskBody, names: SecretNames) -> str:
    def part(name: str, value: str, _kind: str) -> str:
        return _digest(value) if value and names.match(name) else value

    def member(found: re.Match[str]) -> str:
        name, colon, value = found.groups()
        if not names.match(name):
            return found[0]
        return f'"{name}"{colon}"{_digest(value.strip(chr(34)))}"'

    text = body.content
    if is_form_in_parts(text, body.content_type):
        text = replaced_in_form(text, body.content_type, part)
    return _MEMBER.sub(member, _without_secrets(text, names))


# -- the file --


class RulesFile:
    """The file of a server's rules, which is read again when it changes. One that cannot be used
    leaves the rules before it."""

    def __init__(self, path: Path, gateway: RuledGateway) -> None:
        self._path = path
        self._gateway = gateway
        self._seen: tuple[int, int, int] | None = None

    def read(self) -> GatewayRules:
        """Return the rules of the file. Raises ConveyorError(invalid_argument), whose detail names
        file, line, word and reason."""
        try:
            if not stat.S_ISREG(self._path.stat().st_mode):
                # A pipe may have no writer: nothing is waited for.
                detail = f"{self._path}: is no regular file"
                raise ConveyorError(ErrorCode.INVALID_ARGUMENT, detail)
            with open(self._path, "rb") as file:
                document = file.read(4 * MOST_TEXT + 1)
        except OSError as error:
            detail = f"{self._path}: cannot be read: {error.strerror}"
            raise ConveyorError(ErrorCode.INVALID_ARGUMENT, detail) from None
        name = str(self._path)
        return rules_of_toml(_text(document, name), name, body_reader(self._path.parent))

    def start(self) -> GatewayRules:
        """Follow the file as it is now. Raises ConveyorError(invalid_argument)."""
        self._seen = self._look()
        rules = self.read()
        self._gateway.follow(rules)
        return rules

    async def watch(self, clock: Clock) -> None:
        """Look at the file once a second, until cancelled."""
        while True:
            await clock.sleep(LOOK_EVERY)
            await self.follow_change(clock)

    async def follow_change(self, clock: Clock) -> None:
        """Read the file again if it has changed and is at rest; log why it cannot be used."""
        seen = self._look()
        if seen == self._seen:
            return
        await clock.sleep(SETTLES_IN)
        if self._look() != seen:
            return
        self._seen = seen
        try:
            rules = await run_sync(self.read)
        except ConveyorError as error:
            _log.error("%s; the rules before it stay", error.detail, extra=NEWS)
            return
        except Exception as error:
            # The server works on without this file.
            told = f"{type(error).__name__}: {error}"
            _log.error("%s: %s; the rules before it stay", self._path, told, extra=NEWS)
            return
        self._gateway.follow(rules)
        _log.info("%s: %d rules from now on", self._path, len(rules.rules))

    def _look(self) -> tuple[int, int, int] | None:
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino
