"""The hosts of a run on a terminal."""

from __future__ import annotations

from typing import Any

import pytest

from conveyor.cli.commands import job_options
from conveyor.client.listing import HOSTS_HEADER, held_host_line, host_line
from conveyor.client.wire import HostReply


def test_the_numbers_of_a_host_stand_below_their_titles() -> None:
    host = HostReply(host="shop.test:443", pending=8_214, claimed=2, done=351, failed=0)
    lines = HOSTS_HEADER, host_line(host)
    assert [line.split()[-1] for line in lines] == ["limits", "shop.test:443"]
    for title, number in [("waiting", "8,214"), ("claimed", "2"), ("done", "351"), ("failed", "0")]:
        end = HOSTS_HEADER.index(title) + len(title)
        assert lines[1][:end].endswith(f" {number}")


def test_limits_and_what_a_host_has_said_stand_behind_it() -> None:
    host = HostReply(
        host="shop.test:443",
        pending=1,
        claimed=0,
        done=0,
        failed=0,
        limit=2,
        rate=0.5,
        ceiling=1,
        closed_until="2026-11-30T10:15:00.000Z",
    )
    assert host_line(host).endswith(
        "  shop.test:443, 2 at a time, 0.5 a second, 1 at a time since it refused, "
        "closed until 2026-11-30 10:15:00 UTC"
    )


def held(**fields: Any) -> HostReply:
    return HostReply(
        host="shop.test:443", done=0, failed=0, **{"pending": 8, "claimed": 0} | fields
    )


def test_each_limit_of_a_host_is_shown_with_who_set_it() -> None:
    host = held(limit=2, limit_set_by="pattern", rate=0.5, rate_set_by="job", pattern="*.test")
    assert host_line(host).endswith("443, 2 at a time (pattern *.test), 0.5 a second (job)")
    assert host_line(held(interval=2.5)).endswith("443, 2.5 s apart (robots.txt)")
    host = held(limit=2, limit_set_by="pattern", rate=0.5, rate_set_by="pattern", pattern="*.test")
    assert host_line(host).endswith("443, 2 at a time, 0.5 a second (pattern *.test)")


@pytest.mark.parametrize(
    ("host", "line"),
    [
        (held(claimed=2, detail="at most 2 calls"), "8 tasks wait, 2 claimed; at most 2 calls"),
        (held(pending=1, detail="at most 1 call"), "1 task waits; at most 1 call"),
        (held(rate=0.5, detail="slow"), "8 tasks wait; slow; so these take 16 s at least"),
        (
            held(rate=2, interval=3, detail="slow"),
            "8 tasks wait; slow; so these take 24 s at least",
        ),
        (held(rate=0.2, interval=3, detail="no"), "8 tasks wait; no; so these take 40 s at least"),
        (held(detail="new\x1b[2J"), "8 tasks wait; new\\x1b[2J"),
        (held(), "8 tasks wait; it is at a limit"),
    ],
)
def test_a_host_that_holds_a_run_back_is_told_with_what_bounds_it(
    host: HostReply, line: str
) -> None:
    assert held_host_line(host, is_whole=True) == f"shop.test:443: {line}"


def test_no_time_is_told_of_a_run_that_was_counted_in_part() -> None:
    host = held(rate=0.5, rate_set_by="job")
    assert "at least" not in held_host_line(host, is_whole=False)


@pytest.mark.parametrize(
    ("flags", "politeness"),
    [
        ((None, None, False), None),
        ((0, None, False), {"per_host": 0}),
        ((2, 0.5, True), {"per_host": 2, "per_host_rate": 0.5, "robots": True}),
    ],
)
def test_flags_become_the_politeness_of_a_job(
    flags: tuple[int | None, float | None, bool], politeness: dict[str, Any] | None
) -> None:
    names = ("per_host", "per_host_rate", "robots")
    given: dict[str, Any] = {"params": (), **dict(zip(names, flags, strict=True))}
    assert job_options(given).politeness == politeness
