"""The limits on the calls of a host: what a host is, and which limits hold for it.

A host is a name and a port, whatever the scheme, in one spelling: lower case, ASCII. Limits come
from the settings of the server, and from a file of patterns that overrule them; they bound the
calls of all callers together. Those of a job bound the calls of its caller.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

import msgspec

from conveyor.domain.text_rules import shorten

LEAST_RATE, MOST_RATE = 0.01, 1_000.0
MOST_LIMIT = 1_000
MOST_PATTERNS = 10_000
_WORDS = {"limit", "rate", "together"}
_NO_NAME = frozenset("/@*?#\\")
"""Characters that a URL may hold around a host, but no host."""


def host_key(name: str, caller: str = "") -> str:
    """Return the key of a host in the ledger of permits and in the pacing, where those of jobs have
    their ids: for the calls of all callers, or of one."""
    return f"host:{caller}:{name}" if caller else f"host:{name}"


class Politeness(msgspec.Struct, frozen=True, omit_defaults=True):
    """The manners that a job asks for, at each host: calls of its caller in flight and their starts
    a second, 0 for no limit, and whether robots.txt is heeded."""

    per_host: int = 0
    per_host_rate: float = 0.0
    robots: bool = False

    def __bool__(self) -> bool:
        return self != _RUDE


_RUDE = Politeness()


class LimitSource(StrEnum):
    """The place where a limit of a host was set: a setting of the server, a pattern of its file, or
    the politeness of the job."""

    SERVER = "server"
    PATTERN = "pattern"
    JOB = "job"


class HostRule(msgspec.Struct, frozen=True):
    """The limits of a host, or of several together, whose `name` they share: at most `limit` calls
    in flight, and `rate` starts a second; 0 is no limit. They bound the calls of all callers, or of
    `caller` alone."""

    name: str
    limit: int
    rate: float
    caller: str = ""

    @property
    def key(self) -> str:
        """The key of its permits and starts."""
        return host_key(self.name, self.caller)


class HostLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The strictest limits of the calls of a caller at a host, 0 for none, and who set them: a
    `pattern`, if it did, or if it has its hosts counted `together`. With `robots` the robots.txt of
    the host may space the calls further."""

    limit: int = 0
    limit_set_by: LimitSource | None = None
    rate: float = 0.0
    rate_set_by: LimitSource | None = None
    pattern: str = ""
    together: bool = False
    robots: bool = False

    def sentence(self, interval: float = 0.0) -> str:
        """Say the limits and who set them; empty without any. The host itself wants its calls an
        `interval` apart."""
        calls = "1 call" if self.limit == 1 else f"{self.limit:,} calls"
        bounds = {"LIMIT": f"{calls} at a time", "RATE": _pace(self.rate) if self.rate else ""}
        sources = {"LIMIT": self.limit_set_by, "RATE": self.rate_set_by}
        parts = []
        for source in dict.fromkeys(filter(None, sources.values())):
            of_source = [what for what in bounds if sources[what] is source]
            at_most = " and ".join(bounds[what] for what in of_source)
            parts.append(f"at most {at_most}, {self._set(source, of_source)}")
        if interval:
            parts.append(f"its robots.txt asks for {interval:g} s between calls (Crawl-delay)")
        elif self.robots:
            parts.append("its robots.txt may ask for a pause between calls (Crawl-delay)")
        return "; ".join(parts)

    def _set(self, source: LimitSource, what: Sequence[str]) -> str:
        if source is LimitSource.JOB:
            return f"set by the job ({', '.join(_OPTIONS[one] for one in what)})"
        settings = ", ".join(f"CONVEYOR_HOST_{one}" for one in what)
        by = f"set by the server ({settings})"
        if source is LimitSource.PATTERN:
            by = f'set by the server\'s file of hosts ("{self.pattern}")'
        return f"{by} for all hosts of {self.pattern} together" if self.together else by


_OPTIONS = {"LIMIT": "--per-host", "RATE": "--per-host-rate"}
"""The options of a job, by the last word of the settings of a server for the same."""


def _pace(rate: float) -> str:
    """Write calls a second so that a slow pace reads well."""
    if rate == 1:
        return "one call a second"
    return f"{rate:g} calls a second" if rate > 1 else f"one call every {1 / rate:.3g} s"


MOST_RUNS = 64
"""Runs whose places in one line are known apart."""


@dataclass(slots=True)
class HostLine:
    """The line of a host: places up to its `end`, in the seconds of some clock; and how many of
    them each of `runs` has, from the first to the last one. Runs that have left it have left `free`
    places behind, spread from `since` to `until`: these are given first."""

    end: float = -math.inf
    free: float = 0.0
    since: float = 0.0
    until: float = -math.inf
    runs: dict[str, tuple[int, float, float]] = field(default_factory=dict)

    def take(self, run: str, begins: float, step: float, now: float) -> float:
        """Take the next place of a line that begins then, for a message of a run. That instant is
        a place itself if it is to come: there is a start then, which nobody has."""
        if self.since < begins < self.until:
            self.free *= (self.until - begins) / (self.until - self.since)
            self.since = begins
        place = max(begins if begins > now else begins + step, self.end + step)
        if self.free >= 1 and begins < self.until:
            freed = self.since + max(step, (self.until - self.since) / self.free)
            if freed <= self.until:
                place = freed
                self.free, self.since = self.free - 1, freed
        self.end = max(self.end, place)
        count, first, last = self.runs.pop(run, (0, place, place))
        if len(self.runs) >= MOST_RUNS:
            self.runs = {one: had for one, had in self.runs.items() if had[2] > now}
        if run and len(self.runs) < MOST_RUNS:
            self.runs[run] = count + 1, min(first, place), max(last, place)
        return place

    def to_come(self, now: float) -> int:
        """Count the places that are still to come."""
        return round(sum(_left(*places, now) for places in self.runs.values()))

    def leave(self, run: str, now: float) -> None:
        """Let others have the places of a run that are still to come."""
        if run not in self.runs:
            return
        count, first, last = self.runs.pop(run)
        if not any(other > now for _, _, other in self.runs.values()):
            self.end = self.until = -math.inf
            return
        if last <= now:
            return
        left = _left(count, first, last, now)
        has_free = self.free >= 1 and self.until > now
        self.since = min(max(now, first), self.since) if has_free else max(now, first)
        self.until = max(last, self.until) if has_free else last
        self.free = left + (self.free if has_free else 0.0)


def _left(count: int, first: float, last: float, now: float) -> float:
    """Return how many places of a run are still to come, which has so many from first to last."""
    if last <= now:
        return 0.0
    return count if first >= now else count * (last - now) / (last - first)


class HostPattern(msgspec.Struct, frozen=True):
    """A row of the file: what it says of the hosts that it names. None says nothing; with
    `together` all its hosts are counted as one."""

    limit: int | None = None
    rate: float | None = None
    together: bool = False


class BadHostRules(ValueError):
    """A file of patterns that cannot be used; the text says where."""


def host_and_port(url: str) -> str:
    """Return the host of a URL in one spelling, with its port; empty if it cannot be read."""
    from pydantic_core import Url

    try:
        parsed = Url(url)
    except ValueError:
        return ""
    name = (parsed.host or "").rstrip(".")
    return f"{name}:{parsed.port}" if name else ""


class HostRules:
    """The limits of a server: `limit` and `rate` of every host, and patterns that overrule them.

    A pattern is `example.com`, or `*.example.com` for all names below, or `*`; with a port behind a
    colon it holds for that alone. The closest one holds: a name before a pattern of names below it,
    a longer one before a shorter, one with the port before one without.
    """

    def __init__(
        self, *, limit: int = 0, rate: float = 0.0, patterns: dict[str, HostPattern] | None = None
    ) -> None:
        self._limit = limit
        self._rate = rate
        self._patterns = patterns or {}

    def __bool__(self) -> bool:
        return bool(self._limit or self._rate or self._patterns)

    def is_like(self, other: HostRules) -> bool:
        """Tell whether the same limits hold by other rules."""
        mine, theirs = ((one._limit, one._rate, one._patterns) for one in (self, other))
        return mine == theirs

    def rule_of(self, url: str) -> HostRule | None:
        """Return the limits that hold for the host of a URL; None if there are none."""
        host = host_and_port(url)
        rule = self.rule_for(host) if host else None
        return rule if rule is not None and (rule.limit or rule.rate) else None

    def rule_for(self, host: str) -> HostRule:
        """Return the limits of a host, which may be none."""
        found, pattern = self.closest(host)
        limit = self._limit if pattern.limit is None else pattern.limit
        rate = self._rate if pattern.rate is None else pattern.rate
        return HostRule(found if pattern.together else host, limit, rate)

    def closest(self, host: str) -> tuple[str, HostPattern]:
        """Return the pattern that holds for a host, and what it says; "" where none does."""
        name, _, port = host.rpartition(":")
        labels = [] if name.startswith("[") else name.split(".")
        below = [f"*.{'.'.join(labels[place:])}" for place in range(1, len(labels))]
        for text in (name, *below, "*"):
            for key in (f"{text}:{port}", text):
                pattern = self._patterns.get(key)
                if pattern is not None:
                    return key, pattern
        return "", HostPattern()


class HostPolicies:
    """Finds the rules that hold for the calls of a run at a host, by the server's rules as `rules`
    returns them at that moment, and by the politeness of the run."""

    def __init__(self, rules: Callable[[], HostRules]) -> None:
        self._rules = rules
        self._latest = rules()

    @property
    def current(self) -> HostRules:
        """The rules of the server as they are now: the same object until they change."""
        rules = self._rules()
        if rules is not self._latest and not rules.is_like(self._latest):
            self._latest = rules
        return self._latest

    def hold(self, politeness: Politeness | None) -> bool:
        """Tell whether a run may have rules at all."""
        return bool(politeness) or bool(self._rules())

    def rules_of(
        self, host: str, caller: str, politeness: Politeness | None
    ) -> tuple[HostRule, ...]:
        """Return the rules that hold for the calls of a caller at a host; none if nothing bounds
        them.

        The first is the server's, for all callers; without a limit where only the run has one, as
        the host may be closed for everybody. The second is the run's own, if it has any.
        """
        if not host or not self.hold(politeness):
            return ()
        servers = self._rules().rule_for(host)
        if politeness:
            own = HostRule(host, politeness.per_host, politeness.per_host_rate, caller)
            return servers, own
        return (servers,) if servers.limit or servers.rate else ()

    def limits_of(self, host: str, caller: str, politeness: Politeness | None) -> HostLimits:
        """Return the strictest limits that hold for the calls of a caller at a host, and who set
        them."""
        rules = self.rules_of(host, caller, politeness)
        pattern, says = self._rules().closest(host)
        limit, limit_by = _strictest([rule.limit for rule in rules], says.limit)
        rate, rate_by = _strictest([rule.rate for rule in rules], says.rate)
        servers = {limit_by, rate_by} - {None, LimitSource.JOB}
        together = says.together and bool(servers)
        return HostLimits(
            limit=limit,
            limit_set_by=limit_by,
            rate=rate,
            rate_set_by=rate_by,
            pattern=pattern if together or LimitSource.PATTERN in servers else "",
            together=together,
            robots=politeness is not None and politeness.robots,
        )


Bound = TypeVar("Bound", int, float)


def _strictest(bounds: Sequence[Bound], said: Bound | None) -> tuple[Bound, LimitSource | None]:
    """Return the strictest of the bounds, of the server and of the job, and who set it: 0 and None
    without any. `said` is what the server's pattern says of it."""
    servers = LimitSource.SERVER if said is None else LimitSource.PATTERN
    found = [one for one in zip(bounds, (servers, LimitSource.JOB), strict=False) if one[0]]
    # Of two that are as strict the server's is named: it bounds everybody.
    return min(found, key=lambda one: one[0], default=(type(bounds[0])() if bounds else 0, None))


def paces(rules: Sequence[HostRule], host: str, caller: str) -> dict[str, float]:
    """Return the least seconds between two starts by the keys under which they are booked, for the
    calls of a caller at a host with rules. A host may be closed under each of these keys, so its
    own and the caller's are among them even if no rule has them."""
    steps = {rule.key: 1 / rule.rate if rule.rate else 0.0 for rule in rules}
    for key in (host_key(host), host_key(host, caller)):
        steps.setdefault(key, 0.0)
    return steps


def parse_host_patterns(text: str) -> dict[str, HostPattern]:
    """Parse a file of patterns. Raises BadHostRules, which says what is wrong with which one."""
    try:
        rows = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadHostRules(f"is no TOML: {shorten(str(error))}") from None
    except ValueError:
        raise BadHostRules("holds a number of too many digits") from None
    except RecursionError:
        raise BadHostRules("is nested too deep") from None
    if len(rows) > MOST_PATTERNS:
        raise BadHostRules(f"holds {len(rows)} patterns, of {MOST_PATTERNS} at most")
    patterns: dict[str, HostPattern] = {}
    for pattern, row in rows.items():
        spelled = _spelled(pattern)
        if spelled in patterns:
            told, other = shorten(pattern), shorten(spelled)
            raise BadHostRules(f"{told!r} names the hosts of another pattern, {other!r}")
        patterns[spelled] = _parse(shorten(pattern), row)
    return patterns


def _spelled(pattern: str) -> str:
    """Return a pattern in the spelling of hosts."""
    below = "*." if pattern.startswith("*.") else ""
    rest = pattern.removeprefix(below)
    is_any = rest == "*" or rest.startswith("*:")
    if is_any and not below:
        rest = f"any{rest[1:]}"
    is_name = not (_NO_NAME.intersection(rest) or rest.endswith(":") or len(rest.split()) != 1)
    host = host_and_port(f"http://{rest}/") if is_name else ""
    name, _, port = host.rpartition(":")
    is_address = name.startswith("[") or name.rpartition(".")[2].isdecimal()
    if not host or (below and is_address):
        raise BadHostRules(f"{shorten(pattern)!r} is no pattern of hosts, such as *.example.com")
    spelled = f"{below}{'*' if is_any else name}"
    return f"{spelled}:{port}" if rest.rpartition(":")[2].isdecimal() else spelled


def _parse(pattern: str, row: Any) -> HostPattern:
    if not isinstance(row, dict):
        raise BadHostRules(f"{pattern!r} must have a table, such as {{ limit = 2, rate = 0.5 }}")
    if unknown := sorted(row.keys() - _WORDS):
        raise BadHostRules(f"{pattern!r} has the unknown word {shorten(unknown[0])!r}")
    together = row.get("together", False)
    if not isinstance(together, bool):
        raise BadHostRules(f"together of {pattern!r} must be true or false")
    limit, rate = row.get("limit"), row.get("rate")
    if limit is not None and (type(limit) is not int or not 0 <= limit <= MOST_LIMIT):
        raise BadHostRules(f"limit of {pattern!r} must be a whole number from 0 to {MOST_LIMIT:,}")
    if rate is not None and (type(rate) not in (int, float) or not is_rate(rate)):
        raise BadHostRules(f"rate of {pattern!r} must be 0, or from {LEAST_RATE} to {MOST_RATE:g}")
    return HostPattern(limit, None if rate is None else float(rate), together)


def is_rate(rate: float) -> bool:
    """Tell whether so many starts a second can be kept; 0 is no limit."""
    return rate == 0 or LEAST_RATE <= rate <= MOST_RATE
