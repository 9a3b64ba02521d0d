"""A job is found by the beginning of its id, within bounds."""

from __future__ import annotations

import io

import click
import pytest

from conveyor.cli.completion import SUGGESTED_JOBS, suggest_jobs
from conveyor.client.commands import FIRST_CALL, ServerTarget, Terminal, submit_tasks
from conveyor.client.errors import ClientError
from conveyor.client.inputs import SourcedTask
from conveyor.client.jobs import SEARCHED, find_job, find_jobs
from conveyor.client.progress import LineView
from conveyor.client.submit import JobOptions
from conveyor.client.watch import PATIENCE, follow, summary
from conveyor.client.wire import RunReply, StatsReply
from tests.unit.scripted_server import KEY, RUN, Answer, Pace, asked, ok, scripted

IDS = [
    "01M8M2ZZZZZZZZZZZZZZZZZZZZ",
    "01M8M2AAAAAAAAAAAAAAAAAAAA",
    "01M8M0AAAAAAAAAAAAAAAAAAAA",
    "01M7AAAAAAAAAAAAAAAAAAAAAA",
]


def listing(ids: list[str], cursor: str | None = None) -> Answer:
    jobs = [{"job_id": job_id, "status": "closed"} for job_id in ids]
    return ok({"jobs": jobs, "next_cursor": cursor})


async def test_a_whole_id_costs_no_request() -> None:
    async with asked(listing(IDS)) as (api, server, _pace):
        assert await find_job(api, IDS[1]) == IDS[1]
        assert await find_job(api, "not-a-job") == "not-a-job"
    assert server.told == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("last", IDS[0]),
        (IDS[1].lower(), IDS[1]),
        ("01M7", IDS[3]),
        ("01m8m0", IDS[2]),
        (IDS[1][:-1], IDS[1]),
    ],
)
async def test_an_abbreviation_finds_the_one_that_it_names(text: str, found: str) -> None:
    async with asked(listing(IDS)) as (api, _server, _pace):
        assert await find_job(api, text) == found


async def test_several_jobs_are_named_in_one_line() -> None:
    async with asked(listing(IDS)) as (api, _server, _pace):
        with pytest.raises(ClientError) as caught:
            await find_jobs(api, [IDS[0], "01M8M"])
        assert str(caught.value) == (
            f"01M8M begins the ids of several jobs: {IDS[0]}, {IDS[1]}, {IDS[2]}"
        )
        with pytest.raises(ClientError, match=rf"jobs: {IDS[0]}, {IDS[1]}, {IDS[2]}, …$"):
            await find_job(api, "01")


async def test_the_search_ends_behind_the_place_of_the_id() -> None:
    async with asked(listing(IDS, "more")) as (api, server, _pace):
        with pytest.raises(ClientError, match="^no such job: 01M7Z$"):
            await find_job(api, "01M7Z")
    assert len(server.told) == 1


@pytest.mark.slow
async def test_the_search_is_bounded() -> None:
    page = [f"7ZZZZZZZZZZZZZZZZZZZZZZ{number:03}" for number in range(100)]
    async with asked(listing(page, "more")) as (api, server, _pace):
        with pytest.raises(ClientError, match="none of the newest 1,000 jobs begins with 01M8M"):
            await find_job(api, "01M8M")
    assert len(server.told) == SEARCHED // 100


STOPPED = RunReply(
    run_id="R", job_id="J", status="stopped", stats=StatsReply(total=4, completed=1, successful=1)
)


def unfinished(*states: str, cursor: str | None = None) -> Answer:
    rows = [
        {"task_id": str(number), "url": "http://a/", "status": state}
        for number, state in enumerate(states)
    ]
    return ok({"results": rows, "next_cursor": cursor})


def stopped(completed: int) -> Answer:
    return ok({**RUN, "status": "stopped", "stats": {"total": 4, "completed": completed}})


async def test_a_stopped_run_ends_with_its_last_call_in_flight() -> None:
    answers = [
        unfinished("pending", cursor="page 2"),
        unfinished("processing", "pending"),
        stopped(1),
        unfinished("processing", "pending"),
        stopped(2),
        unfinished("pending", "pending"),
        stopped(3),
    ]
    async with asked(*answers) as (api, server, _pace):
        run = await follow(api, STOPPED, LineView(io.StringIO()))
    assert summary(run).startswith("stopped: 4 tasks")
    # One call ended between the last look at the run and that at its rows.
    assert run.stats.completed == 3
    # A page of rows that nobody will take up is read once.
    pages = [told.path for told in server.told if "/results" in told.path]
    assert ["cursor=page" in path for path in pages] == [False, True, True, True]


@pytest.mark.slow
async def test_a_call_that_never_ends_is_not_waited_for_for_ever() -> None:
    row = {"task_id": "1", "url": "http://a/", "status": "processing"}
    run_and_rows = {**RUN, "status": "stopped", "stats": {"total": 4, "completed": 1}}
    async with asked(ok({**run_and_rows, "results": [row]})) as (api, _server, pace):
        run = await follow(api, STOPPED, LineView(io.StringIO()))
    assert run.stats.completed == 1
    assert PATIENCE < pace.monotonic() < 2 * PATIENCE


async def test_a_run_that_was_worked_whole_asks_for_no_rows() -> None:
    whole = RunReply(run_id="R", job_id="J", status="completed", stats=StatsReply(total=1))
    async with asked(ok({})) as (api, server, _pace):
        assert await follow(api, whole, LineView(io.StringIO())) is whole
    assert server.told == []


GONE = {"shared": "gateway", "detail": "the gateway http://gw.test/ cannot be reached"}
NOBODY = {"reason": "no_worker", "since": "", "detail": "no worker is alive"}
CAPPED = {"reason": "max_inflight", "since": "", "detail": "the cap is in use"}


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ({"outage": GONE}, "the gateway http://gw.test/ cannot be reached"),
        ({"waiting": NOBODY}, "no worker is alive"),
        ({"waiting": CAPPED}, None),
        ({"outage": GONE, "pause_state": "paused"}, None),
        ({"status": "completed"}, None),
    ],
)
async def test_a_submit_that_nobody_watches_says_what_its_job_waits_for(
    found: dict[str, object], told: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    accepted = ok({"job_id": "J", "latest_run": RUN, "accepted_tasks": 1})
    pace = Pace()
    with scripted(accepted, ok({**RUN, **found})) as server:
        target = ServerTarget(server.origin, KEY, pace)
        tasks = [SourcedTask({"url": "http://a.test/"}, "line 1")]
        assert await submit_tasks(target, Terminal(), tasks, JobOptions()) == 0
    out, warned = capsys.readouterr()
    assert out == "job J: 1 task accepted\n"
    expected = f"warning: {told}; the job waits for it: conveyor watch J\n"
    assert warned == ("" if told is None else expected)
    assert pace.slept == []


async def test_a_submit_to_a_terminal_waits_for_the_first_call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    accepted = ok({"job_id": "J", "latest_run": RUN, "accepted_tasks": 1})
    pace = Pace()
    with scripted(accepted, (404, {}, b"{}")) as server:
        monkeypatch.setattr("sys.stderr.isatty", lambda: True)
        target = ServerTarget(server.origin, KEY, pace)
        tasks = [SourcedTask({"url": "http://a.test/"}, "line 1")]
        assert await submit_tasks(target, Terminal(), tasks, JobOptions()) == 0
    assert pace.slept == [FIRST_CALL]
    assert capsys.readouterr().err == ""


SCHEDULED = {"job_id": "J", "status": "closed", "next_scheduled_run": None}


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (
            ok(SCHEDULED | {"next_scheduled_run": "2027-03-01T08:00:00.000Z"}),
            "it fires first at 2027-03-01 08:00:00 UTC; all its fires: conveyor schedule show J\n",
        ),
        (ok(SCHEDULED), ""),
        ((404, {}, b"{}"), ""),
    ],
)
async def test_a_submit_with_a_schedule_says_when_it_fires_first(
    answer: Answer, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with scripted(ok({"job_id": "J", "accepted_tasks": 1}), answer) as server:
        target = ServerTarget(server.origin, KEY, Pace())
        tasks = [SourcedTask({"url": "http://a.test/"}, "line 1")]
        options = JobOptions(schedule={"rate": {"every": 6, "unit": "hour"}})
        assert await submit_tasks(target, Terminal(), tasks, options) == 0
    assert capsys.readouterr() == (f"job J: 1 task accepted for each run\n{told}", "")


def suggested(origin: str, word: str) -> list[str]:
    command = click.Command("watch")
    context = click.Context(command)
    context.params = {"server": origin, "api_key": KEY}
    return [item.value for item in suggest_jobs(context, click.Argument(["job"]), word)]


def test_a_shell_completes_an_old_job_as_a_command_finds_it() -> None:
    newer = [f"01M8M3{number:020}" for number in range(99, -1, -1)]
    with scripted(listing(newer, "more"), listing(IDS[1:])) as server:
        assert suggested(server.origin, "01M8M0") == [IDS[2]]
        assert len(server.told) == 2


def test_a_shell_is_offered_the_newest_jobs_and_as_many_as_it_shows() -> None:
    newer = [f"01M8M3{number:020}" for number in range(99, -1, -1)]
    with scripted(listing(newer, "more"), listing(IDS[1:])) as server:
        assert suggested(server.origin, "") == ["last", *newer[:SUGGESTED_JOBS]]
        assert len(server.told) == 1
