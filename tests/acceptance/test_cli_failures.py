"""Failed tasks by kind, and their rerun, as a person sees them in a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from conveyor.testing.local_server import ConveyorServer, conveyor_server
from tests.acceptance.support_cli import conveyor

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.extended]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConveyorServer]:
    with conveyor_server(tmp_path_factory.mktemp("data")) as booted:
        yield booted


def test_each_kind_of_failure_comes_with_the_command_that_runs_it_again(
    server: ConveyorServer,
) -> None:
    gone = [server.url(f"gone{n}", status=404) for n in range(3)]
    # The gateway is well by the second run.
    flaky = [server.url(f"flaky{n}", flaky=1) for n in range(2)]
    ran = conveyor(
        server, "submit", server.url("good"), *gone, *flaky, "--watch", "--max-attempts", "1"
    )
    assert ran.code == 3

    listed = conveyor(server, "failures", ran.job_id)
    assert (listed.code, listed.err) == (3, [])
    assert listed.out[0].split()[:2] == ["tasks", "group"]
    commands = [line.strip() for line in listed.out if "conveyor rerun" in line]
    assert len(commands) == 2
    assert listed.out[-1] == "5 tasks failed"
    shown = json.loads(conveyor(server, "failures", ran.job_id, "--json").out[0])
    groups = [group["group"] for group in shown["groups"]]
    assert [group["count"] for group in shown["groups"]] == [3, 2]
    assert [command.split()[-1] for command in commands] == groups

    rows = conveyor(server, "results", ran.job_id, "--group", groups[0], "--jsonl").out
    assert sorted(json.loads(row)["url"] for row in rows) == sorted(gone)

    again = conveyor(server, *commands[1].split()[1:], "--watch")
    assert again.out[0] == f"job {ran.job_id}: 2 tasks to run again, 4 kept"
    assert again.out[-1].startswith("completed: 6 tasks, 3 ok, 3 failed")
    left = json.loads(conveyor(server, "failures", ran.job_id, "--json").out[0])
    assert [group["group"] for group in left["groups"]] == groups[:1]

    earlier = conveyor(server, "failures", ran.job_id, "--run", shown["run_id"])
    assert [line for line in earlier.out if "conveyor rerun" in line] == []
    assert earlier.err == ["a newer run is there: only tasks of the latest one run again"]


def test_a_job_without_failures_has_nothing_to_list(server: ConveyorServer) -> None:
    ran = conveyor(server, "submit", server.url("fine"), "--watch")
    listed = conveyor(server, "failures", ran.job_id)
    assert (listed.code, listed.out) == (0, ["0 tasks failed"])


def test_what_is_no_group_is_refused_in_one_line(server: ConveyorServer) -> None:
    conveyor(server, "submit", server.url("one"), "--watch")
    for arguments, said in (
        (["failures", "last", "--run", "01ARZ3NDEKTSV4RRFFQ69G5FAV"], "has no run"),
        (["rerun", "last", "--group", "aaaaaaaaaaaa"], "no failed task of such a group"),
        (["results", "last", "--group", "aaaaaaaaaaaa"], "no failed task of such a group"),
    ):
        ran = conveyor(server, *arguments)
        assert (ran.code, len(ran.err)) == (1, 1)
        assert said in ran.err[0]
        if "--group" in arguments:
            job = ran.err[0].split()[2].rstrip(":")
            assert ran.err[0].endswith(f"; its groups: conveyor failures {job}")
