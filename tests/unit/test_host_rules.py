"""The spelling of hosts, and the limits that hold for them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from conveyor.bootstrap.host_rules import (
    LOOK_EVERY,
    MOST_BYTES,
    WatchedHostRules,
    watched_rules,
)
from conveyor.domain.hosts import (
    BadHostRules,
    HostLimits,
    HostPolicies,
    HostRule,
    HostRules,
    LimitSource,
    Politeness,
    host_and_port,
    paces,
    parse_host_patterns,
)
from conveyor.settings import InvalidSetting, Settings
from conveyor.testing.clock import FakeClock

URL = "http://a.example/"


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("https://Shop.Example/p?q=1", "shop.example:443"),
        ("http://shop.example.:8080/", "shop.example:8080"),
        ("http://bücher.example/", "xn--bcher-kva.example:80"),
        ("https://user:word@[2001:DB8::1]/", "[2001:db8::1]:443"),
        ("http://192.0.2.1", "192.0.2.1:80"),
        ("nothing", ""),
    ],
)
def test_a_host_is_a_name_and_a_port_in_one_spelling(url: str, host: str) -> None:
    assert host_and_port(url) == host


PATTERNS = parse_host_patterns(
    """
"example.com" = { limit = 1 }
"*.example.com" = { limit = 2, rate = 0.5, together = true }
"*.deep.example.com" = { rate = 3 }
"Bücher.example:8080" = { limit = 9 }
"*" = { limit = 7 }
"free.example" = { limit = 0, rate = 0 }
"""
)


@pytest.mark.parametrize(
    ("url", "rule"),
    [
        ("https://example.com/", HostRule("example.com:443", 1, 4.0)),
        ("https://a.example.com/", HostRule("*.example.com", 2, 0.5)),
        ("http://b.example.com:81/", HostRule("*.example.com", 2, 0.5)),
        ("https://a.deep.example.com/", HostRule("a.deep.example.com:443", 5, 3.0)),
        ("http://xn--bcher-kva.example:8080/", HostRule("xn--bcher-kva.example:8080", 9, 4.0)),
        ("http://xn--bcher-kva.example/", HostRule("xn--bcher-kva.example:80", 7, 4.0)),
        ("http://notexample.com/", HostRule("notexample.com:80", 7, 4.0)),
        ("http://free.example/", None),
    ],
)
def test_the_closest_pattern_holds_and_the_server_says_the_rest(
    url: str, rule: HostRule | None
) -> None:
    assert HostRules(limit=5, rate=4.0, patterns=PATTERNS).rule_of(url) == rule


def test_a_pattern_may_name_a_port_of_every_host() -> None:
    text = '"*:8080" = { limit = 1 }\n"*" = { limit = 7 }\n"[::1]:81" = { limit = 3 }'
    rules = HostRules(patterns=parse_host_patterns(text))
    assert rules.rule_for("a.example:8080").limit == 1
    assert rules.rule_for("a.example:80").limit == 7
    assert rules.rule_for("[::1]:81").limit == 3


def test_without_limits_no_rule_holds() -> None:
    assert HostRules().rule_of("https://example.com/") is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("= 1", "is no TOML"),
        ('"a.example" = 2', "'a.example' must have a table"),
        ('"a.example" = { limits = 2 }', "'a.example' has the unknown word 'limits'"),
        ('"a.example" = { limit = 1001 }', "limit of 'a.example'"),
        ('"a.example" = { limit = true }', "limit of 'a.example'"),
        ('"a.example" = { rate = 0.001 }', "rate of 'a.example'"),
        ('"a.example" = { rate = nan }', "rate of 'a.example'"),
        ('"a.example" = { together = 1 }', "together of 'a.example'"),
        ('"*.*.example" = {}', "is no pattern of hosts"),
        ('"a*.example" = {}', "is no pattern of hosts"),
        ('"https://a.example/" = {}', "is no pattern of hosts"),
        ('"" = {}', "is no pattern of hosts"),
        (f'"a.example" = {{ limit = {"1" * 5_000} }}', "holds a number of too many digits"),
        (f'"a.example" = {{ rate = 0x{"f" * 5_000} }}', "rate of 'a.example'"),
        (f'"a.example" = {"[" * 3_000}{"]" * 3_000}', "is nested too deep"),
        (f'"{"a" * 100_000}/" = {{}}', "is no pattern of hosts"),
        (f'"a.example" = {{ {"a" * 100_000} = 1 }}', "has the unknown word"),
        ("\0", "is no TOML"),
        ('"*.*" = {}', "is no pattern of hosts"),
        ('"*.*:80" = {}', "is no pattern of hosts"),
        ('"*:" = {}', "is no pattern of hosts"),
        ('"*:http" = {}', "is no pattern of hosts"),
        ('"*:80:80" = {}', "is no pattern of hosts"),
        ('"h?q" = {}', "is no pattern of hosts"),
        ('"h#q" = {}', "is no pattern of hosts"),
        (r'"h\\x" = {}', "is no pattern of hosts"),
        (r'"h\tx" = {}', "is no pattern of hosts"),
        ('"*.7" = {}', "is no pattern of hosts"),
        ('"*.192.0.2.1" = {}', "is no pattern of hosts"),
        ('"*.[::1]" = {}', "is no pattern of hosts"),
        ('"EXAMPLE.com" = {}\n"example.com" = {}', "'example.com' names the hosts of another"),
        ('"*.a.example" = {}\n"*.A.example." = {}', "names the hosts of another"),
    ],
)
def test_a_file_that_cannot_be_used_says_where(text: str, words: str) -> None:
    with pytest.raises(BadHostRules, match=words) as raised:
        parse_host_patterns(text)
    assert len(str(raised.value)) < 500
    assert str(raised.value).isprintable(), "it is told in one line"


HOST = "a.example.com:443"
SERVERS = HostRules(limit=5, rate=4.0, patterns=PATTERNS)


def test_a_job_bounds_its_caller_beside_the_server() -> None:
    policies = HostPolicies(lambda: SERVERS)
    rules = policies.rules_of(HOST, "me", Politeness(per_host=3, per_host_rate=9.0))
    assert rules == (HostRule("*.example.com", 2, 0.5), HostRule(HOST, 3, 9.0, "me"))
    assert [rule.key for rule in rules] == ["host:*.example.com", f"host:me:{HOST}"]
    assert policies.rules_of(HOST, "me", None) == rules[:1]


def test_a_host_of_a_polite_job_may_be_closed_for_everybody() -> None:
    policies = HostPolicies(HostRules)
    rules = policies.rules_of(HOST, "me", Politeness(robots=True))
    assert rules == (HostRule(HOST, 0, 0.0), HostRule(HOST, 0, 0.0, "me"))


@pytest.mark.parametrize("politeness", [None, Politeness()])
def test_without_a_policy_no_rule_holds(politeness: Politeness | None) -> None:
    policies = HostPolicies(HostRules)
    assert not policies.hold(politeness)
    assert policies.rules_of(HOST, "me", politeness) == ()
    free = HostPolicies(lambda: SERVERS).rules_of("free.example:80", "me", politeness)
    assert free == ()


async def test_a_file_of_hosts_is_read_again_when_it_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock, path = FakeClock(), tmp_path / "hosts.toml"

    async def write(text: str, stamp: int) -> None:
        path.write_text(text)
        os.utime(path, (stamp, stamp))
        await clock.advance(LOOK_EVERY)

    def limit() -> int:
        rule = rules().rule_of(URL)
        return 0 if rule is None else rule.limit

    await write('"a.example" = { limit = 2 }', 1)
    rules = WatchedHostRules(clock, str(path), limit=1, rate=0.0)
    assert limit() == 2
    await write('"a.example" = { limit = 3 }', 2)
    assert limit() == 3
    with caplog.at_level(logging.WARNING, "conveyor.hosts"):
        await write('"a.example" = { limit = "4" }', 3)
        for _ in range(3):
            assert limit() == 3
            await clock.advance(LOOK_EVERY)
    assert len(caplog.messages) == 1
    assert "limit of 'a.example'" in caplog.messages[0]


def no_file(_path: Path) -> None:
    """Leave nothing there."""


def a_link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_circle(path: Path) -> None:
    path.symlink_to(path)


def in_latin(path: Path) -> None:
    path.write_bytes('"bücher.example" = {}'.encode("latin-1"))


def a_huge_file(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(MOST_BYTES + 1)


def a_huge_number(path: Path) -> None:
    path.write_text(f'"a.example" = {{ limit = {"1" * 5_000} }}')


WRONG_FILES = [
    (no_file, "cannot be read: No such file"),
    (a_circle, "cannot be read: Too many levels of symbolic links"),
    (os.mkfifo, "is no regular file"),
    (Path.mkdir, "is no regular file"),
    (a_link_to_a_device, "is no regular file"),
    (in_latin, "is no text in UTF-8"),
    (a_huge_file, "more than 4,000,000 bytes"),
    (a_huge_number, "too many digits"),
]


@pytest.mark.parametrize(("make", "words"), WRONG_FILES)
async def test_a_wrong_file_of_hosts_keeps_from_starting_and_changes_no_rules_later(
    tmp_path: Path, make: Callable[[Path], None], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    wrong, path, clock = tmp_path / "wrong", tmp_path / "hosts.toml", FakeClock()
    make(wrong)
    with pytest.raises(InvalidSetting) as raised:
        watched_rules(Settings(hosts=str(wrong)), clock)
    assert raised.value.detail.startswith(f"CONVEYOR_HOSTS {wrong}: ")
    assert words in raised.value.detail
    assert raised.value.detail.isprintable()

    path.write_text('"a.example" = { limit = 2 }')
    rules = watched_rules(Settings(hosts=str(path)), clock)
    path.unlink()
    make(path)
    await clock.advance(2 * LOOK_EVERY)
    for _ in range(3):
        rule = rules().rule_of(URL)
        assert rule is not None
        assert rule.limit == 2
        await clock.advance(LOOK_EVERY)
    [told] = [one for one in caplog.messages if "the rules before hold on" in one]
    assert words in told


def test_starts_are_booked_under_the_keys_of_all_rules_and_of_host_and_caller() -> None:
    servers, own = HostRule("*.a:80", 3, 4.0), HostRule("x.a:80", 2, 0.0, "caller")
    expected = {"host:*.a:80": 0.25, "host:x.a:80": 0.0, "host:caller:x.a:80": 0.0}
    assert paces((servers, own), "x.a:80", "caller") == expected
    assert paces((servers,), "x.a:80", "caller") == expected


@pytest.mark.parametrize(
    ("limits", "sentence"),
    [
        (HostLimits(), ""),
        (HostLimits(limit=2, limit_set_by=LimitSource.JOB),
         "at most 2 calls at a time, set by the job (--per-host)"),
        (HostLimits(limit=1, limit_set_by=LimitSource.SERVER),
         "at most 1 call at a time, set by the server (CONVEYOR_HOST_LIMIT)"),
        (HostLimits(limit=2, limit_set_by=LimitSource.JOB, rate=0.5,
                    rate_set_by=LimitSource.JOB),
         "at most 2 calls at a time and one call every 2 s, set by the job (--per-host, "
         "--per-host-rate)"),
        (HostLimits(limit=2, limit_set_by=LimitSource.SERVER, rate=3.0,
                    rate_set_by=LimitSource.SERVER),
         "at most 2 calls at a time and 3 calls a second, set by the server (CONVEYOR_HOST_LIMIT, "
         "CONVEYOR_HOST_RATE)"),
        (HostLimits(rate=0.5, rate_set_by=LimitSource.JOB),
         "at most one call every 2 s, set by the job (--per-host-rate)"),
        (HostLimits(rate=1.0, rate_set_by=LimitSource.SERVER),
         "at most one call a second, set by the server (CONVEYOR_HOST_RATE)"),
        (HostLimits(rate=2.5, rate_set_by=LimitSource.PATTERN, pattern="*.test"),
         "at most 2.5 calls a second, set by the server's file of hosts (\"*.test\")"),
        (HostLimits(limit=3, limit_set_by=LimitSource.SERVER, pattern="*.test", together=True),
         "at most 3 calls at a time, set by the server (CONVEYOR_HOST_LIMIT) for all hosts of "
         "*.test together"),
        (HostLimits(limit=3, limit_set_by=LimitSource.PATTERN, pattern="*.test", together=True,
                    rate=9, rate_set_by=LimitSource.JOB, robots=True),
         "at most 3 calls at a time, set by the server's file of hosts (\"*.test\") for all hosts "
         "of *.test together; at most 9 calls a second, set by the job (--per-host-rate); its "
         "robots.txt may ask for a pause between calls (Crawl-delay)"),
    ],
)  # fmt: skip
def test_limits_are_said_with_who_set_them(limits: HostLimits, sentence: str) -> None:
    assert limits.sentence() == sentence
