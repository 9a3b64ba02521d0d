"""The commands about scheduled jobs, against a server."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from conveyor.testing.local_server import ConveyorServer, conveyor_server
from tests.acceptance.support_cli import conveyor

pytestmark = [pytest.mark.server, pytest.mark.slow]
NINE = ["--weekly", "mon,fri@9:00", "--zone", "Europe/Berlin"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConveyorServer]:
    with conveyor_server(tmp_path_factory.mktemp("data")) as booted:
        yield booted


def scheduled(server: ConveyorServer, *words: str) -> str:
    ran = conveyor(server, "submit", server.url("page"), *words)
    assert ran.code == 0, ran.err
    return ran.job_id


def test_a_job_is_scheduled_and_listed_with_its_last_run(server: ConveyorServer) -> None:
    job = scheduled(server, *NINE, "--name", "market-poller" * 5)
    before = conveyor(server, "schedule", "list").out
    fired = conveyor(server, "rerun", job, "--watch")
    after = conveyor(server, "schedule", "list").out
    raw = json.loads(conveyor(server, "schedule", "list", "--json").out[0])

    assert (fired.code, fired.out[0]) == (0, f"job {job}: 1 task to run again")
    assert before[0].split() == ["job", "next", "fire", "last", "run"]
    named, at_nine, none = before[1].split()[0], before[1].split()[2], before[1].split()[3:]
    assert (named, at_nine, none) == (job, "09:00", ["none"])
    assert before[2].endswith("…: mon,fri at 09:00, Europe/Berlin")
    assert after[1].split()[3] == "completed"
    assert all(len(line) <= 80 for line in [*before, *after])
    assert (raw["job_id"], raw["schedule"]["timezone"]) == (job, "Europe/Berlin")
    assert raw["latest_run"]["status"] == "completed"


def test_a_schedule_is_paused_resumed_and_replaced(server: ConveyorServer) -> None:
    job = scheduled(server, "--every", "6h", "--overlap", "wait")
    paused = conveyor(server, "schedule", "pause", job)
    listed = conveyor(server, "schedule", "list").out
    resumed = conveyor(server, "schedule", "resume", job, "--json")
    changed = conveyor(server, "schedule", "set", job, "--daily", "2:00", "--zone", "Europe/Berlin")
    shown = conveyor(server, "schedule", "show", job)
    given = json.loads(conveyor(server, "schedule", "show", job, "--json").out[0])

    assert paused.out == [f"job {job}: paused, every 6 hours, UTC"]
    assert listed[1].split()[:2] == [job, "paused"]
    assert json.loads(resumed.out[0])["schedule_state"] == "active"
    assert changed.out[0].startswith(
        f"job {job}: active, daily at 02:00, Europe/Berlin, next fire "
    )
    assert shown.out[0] == f"job {job}: daily at 02:00, Europe/Berlin, active, overlap wait"
    assert [line.split()[0] for line in shown.out[1:]] == ["next"] * 10
    assert {line.split()[2] for line in shown.out[1:]} == {"02:00"}
    assert (given["schedule"]["overlap"], len(given["fires"])) == ("wait", 10)


def test_what_became_of_fires_is_shown(server: ConveyorServer) -> None:
    job = scheduled(server, "--at", "2099-09-01T09:00", "--zone", "Europe/Berlin")
    shown = conveyor(server, "schedule", "show", job)

    assert shown.out == [
        f"job {job}: once at 2099-09-01 09:00, Europe/Berlin, active, overlap skip",
        "next     2099-09-01 09:00",
    ]


def test_a_zone_that_the_rules_have_no_longer_is_told(tmp_path: Path) -> None:
    with conveyor_server(tmp_path / "data") as server:
        job = scheduled(server, "--at", "2099-09-01T09:00", "--zone", "Europe/Berlin")
    with closing(sqlite3.connect(tmp_path / "data" / "conveyor.db")) as database, database:
        gone = "UPDATE jobs SET scheduling = replace(scheduling, 'Europe/Berlin', 'Mars/Phobos')"
        assert database.execute(gone).rowcount == 1
    with conveyor_server(tmp_path / "data") as server:
        shown = conveyor(server, "schedule", "show", job)
        listed = conveyor(server, "schedule", "list")
        paused = conveyor(server, "schedule", "pause", job)

    assert shown.out[0] == f"job {job}: once at 2099-09-01 09:00, Mars/Phobos, active, overlap skip"
    assert shown.out[1].startswith("note     Mars/Phobos: the zone rules 20")
    assert len(shown.out) == 2
    assert listed.out[1].split()[:3] == [job, "2099-09-01", "07:00"]
    assert (paused.code, paused.err) == (0, [])


@pytest.mark.parametrize(
    "words",
    [
        ["submit", "http://fake.test/", "--every", "6h", "--watch"],
        ["submit", "http://fake.test/", "--every", "6h", "--out", "pages"],
        ["submit", "http://fake.test/", "--daily", "09:00"],
        ["schedule", "set", "last"],
        ["schedule", "set", "last", "--every", "6h", "--at", "2099-01-01T00:00", "--zone", "UTC"],
    ],
    ids=" ".join,
)
def test_a_wrong_line_is_told_in_one(server: ConveyorServer, words: list[str]) -> None:
    ran = conveyor(server, *words)
    assert (ran.code, ran.out, len(ran.err)) == (2, [], 1)


def test_a_regular_job_and_one_that_has_not_fired_are_told(server: ConveyorServer) -> None:
    regular = conveyor(server, "submit", server.url("page"), "--watch").job_id
    for words in (["show"], ["pause"], ["set", *NINE]):
        ran = conveyor(server, "schedule", words[0], regular, *words[1:])
        assert (ran.code, len(ran.err)) == (1, 1)
        assert ran.err[0].startswith(f"conveyor: job {regular}: a regular job has no schedule")
    job = scheduled(server, "--every", "6h")
    hints = {
        ("watch",): f"when it fires: conveyor schedule show {job}",
        ("results",): f"when it fires: conveyor schedule show {job}",
        ("stop",): f"to pause its fires: conveyor schedule pause {job}",
        ("pause",): f"to pause its fires: conveyor schedule pause {job}",
        ("resume",): f"to resume its fires: conveyor schedule resume {job}",
        ("rerun", "--failed"): f"for its first one: conveyor rerun {job}",
    }
    for (verb, *more), hint in hints.items():
        named = ["--server", server.base_url]
        ran = conveyor(server, verb, job, *more, *named)
        told = f"conveyor: job {job} has no run yet; {hint} {' '.join(named)}"
        assert (ran.code, ran.out, ran.err) == (1, [], [told])
    unknown = conveyor(server, "results", "nojob")
    assert (unknown.code, unknown.err) == (1, ["conveyor: no such job: nojob"])


def test_a_scheduled_list_is_sent_at_once_and_checked_here(server: ConveyorServer) -> None:
    urls = "".join(f"{server.url(f'page/{number}')}\n" for number in range(10_050))
    checked = conveyor(server, "submit", "-", "--check", "--skip-invalid", *NINE, given=urls)
    made = conveyor(server, "submit", "-", "--json", *NINE, given=urls)

    assert (checked.code, made.code) == (0, 0), (checked.err, made.err)
    reply = json.loads(made.out[0])
    assert (reply["accepted_tasks"], reply["latest_run"]) == (10_050, None)
