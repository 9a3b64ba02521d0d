"""A stream tells the progress of a run to its end, and ends when its server does."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.acceptance.support_boot import Booted, boot
from tests.acceptance.support_calls import Caller, any_problem_of, problem_of
from tests.acceptance.support_data import ForkedServer
from tests.acceptance.support_events import metric, open_socket, opened, path_of, streamed
from tests.acceptance.support_wire import eventually, target

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Booted]:
    directory = tmp_path_factory.mktemp("streams")
    with boot(directory, "--gateway", "fake", max_caller_streams=3, max_streams=4) as server:
        yield server


@pytest.fixture
def caller(server: Booted) -> Iterator[Caller]:
    with Caller(server.api) as caller:
        yield caller
    # What a test opened is gone before the next one counts.
    eventually(lambda: metric(server.origin, "streams") == 0 or None, "all streams are gone")


def test_the_stream_of_a_run_ends_with_its_true_totals(server: Booted, caller: Caller) -> None:
    pages = [target(f"{n}", delay=0.05, status=404 if n % 10 == 0 else 200) for n in range(300)]
    job = caller.submit(*pages)
    with streamed(server.api, path_of(job)) as stream:
        *runs, end = stream
    run = caller.get(path_of(job).removesuffix("/events"))
    assert [event.name for event in runs] == ["run"] * len(runs)
    assert len(runs) > 1
    assert runs[-1].data == run
    assert run["stats"]["completed"] == 300
    assert (end.name, end.data) == (
        "end",
        {"job_id": run["job_id"], "run_id": run["run_id"], "status": "completed"},
    )
    done = [event.data["stats"]["completed"] for event in runs]
    assert done == sorted(done)
    numbers = [event.number or 0 for event in runs]
    assert numbers == sorted(set(numbers))


@pytest.mark.parametrize("last", [None, "", "x", "-1", "1.5", "9" * 400, "0"])
def test_an_ended_run_is_one_event_and_its_end(
    server: Booted, caller: Caller, last: str | None
) -> None:
    job = caller.submit(target("one"))
    run = caller.wait(job)
    with streamed(server.api, path_of(job), last=last) as stream:
        told = list(stream)
    assert [(event.name, event.data["status"]) for event in told] == [
        ("run", "completed"),
        ("end", "completed"),
    ]
    assert told[0].data == run


def test_nobody_keeps_a_stream_and_no_proxy_holds_it_back(server: Booted, caller: Caller) -> None:
    job = caller.submit(target("held", delay=60))
    for method in ("GET", "HEAD"):
        with opened(server.api, path_of(job), method=method) as response:
            assert response.status_code == 200
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            assert response.headers["Cache-Control"] == "no-store"
            assert response.headers["X-Accel-Buffering"] == "no"
            if method == "GET":
                assert next(response.iter_raw()).startswith(b"retry: 2000\n\n")
            else:
                assert response.read() == b""
    caller.http.post(f"/jobs/{job['job_id']}/stop")


def test_a_stranger_finds_no_run(server: Booted, caller: Caller) -> None:
    job = caller.submit(target("mine", delay=60))
    with streamed(server.api, path_of(job)) as stream:
        assert next(stream).name == "run"
        with opened(server.api, path_of(job), key="key-of-a-stranger") as response:
            response.read()
            problem_of(response, status=404, code="not_found")
    caller.http.post(f"/jobs/{job['job_id']}/stop")


def test_too_many_streams_are_refused_until_one_is_gone(server: Booted, caller: Caller) -> None:
    job = caller.submit(target("watched", delay=60))
    with ExitStack() as stack:
        open_now = [stack.enter_context(streamed(server.api, path_of(job))) for _ in range(3)]
        assert [next(stream).name for stream in open_now] == ["run"] * 3
        with opened(server.api, path_of(job)) as refused:
            refused.read()
            problem_of(refused, status=429, code="rate_limited")
            assert int(refused.headers["Retry-After"]) > 0
    eventually(lambda: metric(server.origin, "streams") == 0 or None, "the streams are freed")
    with streamed(server.api, path_of(job)) as stream:
        assert next(stream).name == "run"
        caller.http.post(f"/jobs/{job['job_id']}/stop")
        assert [event.name for event in stream][-2:] == ["run", "end"]


def test_a_reader_goes_on_after_its_server_was_killed(tmp_path: Path) -> None:
    with ForkedServer(tmp_path / "data", "--gateway", "fake") as first:
        with Caller(first.info.api) as caller:
            job = caller.submit(*[target(f"{n}", delay=0.3) for n in range(200)])
        with streamed(first.info.api, path_of(job)) as stream:
            last = next(stream).number
            first.kill()
            with pytest.raises(Exception, match="peer closed|incomplete"):
                list(stream)
    with (
        ForkedServer(tmp_path / "data", "--gateway", "fake") as second,
        streamed(second.info.api, path_of(job), last=str(last)) as stream,
    ):
        *runs, end = stream
    assert end.name == "end"
    assert runs[-1].data["stats"]["completed"] == 200
    numbers = [last or 0, *(event.number or 0 for event in runs)]
    assert numbers == sorted(set(numbers))


def test_an_interrupt_says_good_bye_to_twenty_streams(tmp_path: Path) -> None:
    with ForkedServer(tmp_path / "data", "--gateway", "fake") as server, ExitStack() as stack:
        with Caller(server.info.api) as caller:
            job = caller.submit(status="open")
        streams = [stack.enter_context(streamed(server.info.api, path_of(job))) for _ in range(19)]
        assert [next(stream).name for stream in streams] == ["run"] * 19
        deaf = stack.enter_context(open_socket(server.info.api, path_of(job)))
        assert deaf.recv(4) == b"HTTP"
        server.signal(signal.SIGINT)
        code, errors = server.wait(timeout=60)
        assert [[event.name for event in stream] for stream in streams] == [["bye"]] * 19
    assert (code, errors.splitlines()) == (0, ["stopping"])


def test_other_methods_are_refused(server: Booted, caller: Caller) -> None:
    for path in ("/events", path_of(caller.submit(target("one")))):
        response = caller.http.post(path)
        assert any_problem_of(response)["code"] == "method_not_allowed"
