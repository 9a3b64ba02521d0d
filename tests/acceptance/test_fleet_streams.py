"""Streams of a fleet: a run is read once a second for all, and an API ends in order with them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from conveyor.service.progress import POLL
from conveyor.testing.fleet import RoleFleet
from tests.acceptance.support_calls import Caller, problem_of
from tests.acceptance.support_events import metric, opened, path_of, streamed
from tests.acceptance.support_fleet import fleet
from tests.acceptance.support_wire import eventually, target

pytestmark = [pytest.mark.server, pytest.mark.extended, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RoleFleet]:
    directory = tmp_path_factory.mktemp("streams")
    with fleet(directory, apis=1, workers=2, max_caller_streams=30) as running:
        yield running


def test_a_run_is_read_once_a_second_for_all_who_watch(running: RoleFleet) -> None:
    [api] = running.apis
    with Caller(running.api) as caller, ExitStack() as stack:
        job = caller.submit(*[target(f"{n}", delay=0.2) for n in range(200)])
        streams = [stack.enter_context(streamed(running.api, path_of(job))) for _ in range(10)]
        everything = stack.enter_context(streamed(running.api, "/events"))
        assert next(everything).name == "run"
        told = [list(stream) for stream in streams]
        run = caller.get(path_of(job).removesuffix("/events"))
        last = next(event for event in everything if event.name == "end")
        assert last.data["run_id"] == run["run_id"]
    for *runs, end in told:
        assert (end.name, runs[-1].data) == ("end", run)
        done = [event.data["stats"]["completed"] for event in runs]
        assert done == sorted(done)
        assert done[-1] == 200
    reads = metric(api.info.metrics, "stream_reads_total")
    snapshots = max(len(runs) for runs in told)
    assert snapshots - 2 <= reads <= 3 * snapshots + 10 / POLL
    eventually(lambda: metric(api.info.metrics, "streams") == 0 or None, "all streams are gone")


def test_strangers_find_no_run(running: RoleFleet) -> None:
    with Caller(running.api) as caller:
        job = caller.submit(target("mine"))
        with opened(running.api, path_of(job), key="key-of-a-stranger") as response:
            response.read()
            problem_of(response, status=404, code="not_found")


def test_an_interrupted_api_says_good_bye_and_ends_in_order(running: RoleFleet) -> None:
    [api] = running.apis
    with Caller(running.api) as caller, ExitStack() as stack:
        job = caller.submit(target("held", delay=30))
        streams = [stack.enter_context(streamed(running.api, path_of(job))) for _ in range(20)]
        assert [next(stream).name for stream in streams] == ["run"] * 20
        written = api.log.read_bytes()
        api.signal(signal.SIGINT)
        ends = [[event.name for event in stream][-1] for stream in streams]
        assert ends == ["bye"] * 20
        eventually(lambda: None if api.alive else True, "it ends")
        assert api.end() == 0
    assert b"Traceback" not in api.log.read_bytes()[len(written) :]
    running.restart(api)
    with Caller(running.api) as caller:
        caller.http.post(f"/jobs/{job['job_id']}/stop")
