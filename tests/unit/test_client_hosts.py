"""The hosts of a run on a terminal."""

from __future__ import annotations

from typing import Any

import pytest

from conveyor.cli.commands import job_options
from conveyor.client.listing import HOSTS_HEADER, host_line
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
