"""The public client, unmodified, does all it can do; every answer parses in its models."""

from __future__ import annotations

from pathlib import Path

import httpx
from zenrows.batch import ZenRowsBatchClient
from zenrows.batch.errors import BatchErrorCode as Code
from zenrows.batch.models import (
    IngestStatus,
    JobStatus,
    ResultType,
    RunStatus,
    TaskResult,
    TaskStatus,
)

from conveyor.gateway.fake import expected_body
from tests.acceptance import support_models
from tests.acceptance.support_bindings import Serving
from tests.acceptance.support_boot import Booted
from tests.acceptance.support_calls import Caller
from tests.acceptance.support_client import (
    NOWHERE,
    OPEN_JOB_TASKS,
    Tasks,
    added,
    finish,
    open_client,
    pages,
    refused,
    urls,
)
from tests.acceptance.support_wire import eventually, target
from tests.patient import SECONDS


def test_a_regular_job_from_submit_to_results(client: ZenRowsBatchClient) -> None:
    job = client.submit_regular(
        [
            {"url": target("a"), "external_id": "ord-1", "metadata": {"shop": "north"}},
            {"url": target("b"), "method": "POST", "body": {"query": 1}},
            {"url": target("c"), "zenrows_params": {"response_type": "markdown"}},
            {"url": target("gone", status=404)},
        ],
        zenrows_params={"premium_proxy": True, "wait": 500, "custom_headers": {"X-One": "1"}},
        external_id="batch.7",
        name="Sieben",
        metadata={"team": "blue"},
    )
    assert (job.status, job.accepted_tasks) == (JobStatus.CLOSED, 4)
    finish(job)

    data = job.load().data
    assert (data.external_id, data.name, data.metadata) == ("batch.7", "Sieben", {"team": "blue"})
    assert data.zenrows_params == {
        "premium_proxy": "true",
        "wait": "500",
        "custom_headers": '{"X-One":"1"}',
    }
    run = job.run.load()
    assert run.data.last_batch_received is True
    assert run.data.ingest_status is None
    stats = run.stats
    assert (stats.total, stats.completed, stats.successful, stats.failed) == (4, 4, 3, 1)
    first, second, third, fourth = job.run.results()
    assert (first.external_id, first.metadata) == ("ord-1", {"shop": "north"})
    assert (first.method, first.type) == (None, ResultType.HTML)
    assert second.method is not None
    assert (second.method.value, third.type) == ("POST", ResultType.MARKDOWN)
    assert (fourth.status, fourth.result_url) == (TaskStatus.FAILED, None)
    assert fourth.error is not None
    assert fourth.error.status == 404


def test_results_in_every_filter_over_many_pages(client: ZenRowsBatchClient) -> None:
    kinds: list[dict[str, float | str]] = [{}, {"status": 404}, {}, {"status": 404}, {"delay": 60}]
    submitted: Tasks = [target(f"mixed/{number}", **kinds[number % 5]) for number in range(300)]
    successful = [url for number, url in enumerate(submitted) if number % 5 in (0, 2)]
    failed = [url for number, url in enumerate(submitted) if number % 5 in (1, 3)]
    job = client.submit_regular(submitted)

    def quick_ones_ended() -> bool | None:
        return True if job.run.load().stats.completed == 240 else None

    eventually(quick_ones_ended, "every quick task ends")
    first = client.list_results(job.job_id)
    assert len(first.results) == 100
    assert first.next_cursor is not None
    assert urls(client.iter_results(job.job_id)) == submitted
    assert urls(job.run.results(status="all")) == submitted
    run_id = job.run.load().run_id
    by_status = {"successful": successful, "failed": failed, "processing": submitted[4::5]}
    for status, expected in by_status.items():
        assert urls(job.run.results(status=status)) == expected
        assert urls(client.iter_results(job.job_id, run_id=run_id, status=status)) == expected
    job.run.stop()


def test_what_waits_is_listed_page_by_page(client: ZenRowsBatchClient) -> None:
    job = client.submit_open()
    job.run.pause()
    waiting = pages(OPEN_JOB_TASKS, "waiting")
    job.add_tasks(added(waiting))
    assert client.list_results(job.job_id, status="processing").next_cursor is not None
    assert urls(job.run.results(status="processing")) == waiting
    assert {row.status for row in job.run.results()} == {TaskStatus.PENDING}
    job.run.stop()


def test_an_open_job_takes_tasks_until_it_is_closed(client: ZenRowsBatchClient) -> None:
    job = client.submit_open()
    assert (job.status, job.accepted_tasks) == (JobStatus.OPEN, 0)
    assert job.run.load().status is RunStatus.PENDING
    answer = job.add_tasks(added(pages(3, "added")))
    assert (answer.accepted_tasks, answer.job_status) == (3, JobStatus.OPEN)
    assert answer.latest_run.status is RunStatus.RUNNING
    idle = client.wait_for_run(
        job.job_id, target_statuses={"pending"}, timeout=30, poll_interval=0.05
    )
    assert idle.stats.completed == 3
    job.add_tasks(added([target("added/3")]))
    assert job.close().data.status is JobStatus.CLOSED
    assert job.close().status is JobStatus.CLOSED
    finish(job)
    assert urls(job.run.results()) == pages(4, "added")


def test_the_last_batch_closes_an_open_job(client: ZenRowsBatchClient) -> None:
    job = client.submit_open(pages(1, "last"))
    answer = job.add_tasks(added([target("last/1")], last_batch=True))
    assert answer.job_status is JobStatus.CLOSED
    assert answer.latest_run.last_batch_received is True
    finish(job)
    assert urls(job.run.results()) == pages(2, "last")


def test_waiting_for_ingestion_costs_nothing_on_a_small_job(client: ZenRowsBatchClient) -> None:
    job = client.submit_regular(pages(2, "ingest"), wait_for_ingest=True)
    assert job.submit_response is not None
    assert job.wait_for_ingest(timeout=SECONDS).data.latest_run is not None
    run = job.run.load().data
    assert run.ingest_status is not IngestStatus.PENDING
    finish(job)


def test_downloads_by_external_id_survive_collisions(
    client: ZenRowsBatchClient, tmp_path: Path
) -> None:
    names = ["same", "same", "same", "other", "..", None, ".hidden", "a" * 128]
    sized = [target(f"download/{number}", size=3_000 + number) for number in range(len(names))]
    tasks: Tasks = [
        url if name is None else {"url": url, "external_id": name}
        for url, name in zip(sized, names, strict=True)
    ]
    tasks.append({"url": target("download/failed", status=404), "external_id": "same"})
    job = client.submit_regular(tasks)
    finish(job)
    skipped: list[TaskResult] = []
    count = job.run.download_to_dir(
        tmp_path / "out", use_external_id=True, concurrency=4, status=None, on_skip=skipped.append
    )

    bodies = sorted(expected_body(url) for url in sized)
    files = list((tmp_path / "out").iterdir())
    assert count == len(files) == len(names)
    assert sorted(file.read_bytes() for file in files) == bodies
    assert {"same.html", "same_01.html", "same_02.html", "other.html"} <= {f.name for f in files}
    assert [row.external_id for row in skipped] == ["same"]
    in_memory = job.run.download_to_memory(concurrency=4)
    assert sorted(item.body for item in in_memory) == bodies
    assert {item.content_type for item in in_memory} == {"text/html; charset=utf-8"}
    plain = client.run(job.job_id, job.run.load().run_id)
    assert plain.download_to_dir(tmp_path / "plain") == len(names)
    row = next(plain.results(status="successful"))
    assert plain.download_task_to_memory(row) == expected_body(str(row.url))
    plain.download_task_to_file(row, tmp_path / "one")
    assert (tmp_path / "one").read_bytes() == expected_body(str(row.url))


def test_the_history_of_a_task_tells_each_attempt(client: ZenRowsBatchClient) -> None:
    job = client.submit_regular([target("flaky", flaky=2, cost="0.25"), target("bad", status=404)])
    finish(job)
    flaky, bad = job.run.results()
    events = job.run.task_history(flaky.task_id).events
    assert [event.attempt for event in events] == [1, 2, 3]
    assert [event.error is None for event in events] == [False, False, True]
    assert events[-1].spend is not None
    assert all(event.started_at <= event.ended_at for event in events)
    [only] = client.run(job.job_id, bad.run_id).task_history(bad.task_id).events
    assert only.error == bad.error


def test_jobs_and_runs_are_listed_page_by_page(server: Serving) -> None:
    with open_client(server, "key-of-the-lister") as client:
        made = [client.submit_regular(pages(1, f"list{n}")).job_id for n in range(7)]
        still_open = client.submit_open().job_id
        newest_first = [still_open, *reversed(made)]
        page = client.list_jobs(limit=3)
        assert [job.job_id for job in page.jobs] == newest_first[:3]
        rest = client.list_jobs(limit=100, cursor=page.next_cursor)
        assert [job.job_id for job in rest.jobs] == newest_first[3:]
        assert rest.next_cursor is None
        for size in (1, 2, 100, None):
            listed = list(client.iter_jobs(page_size=size))
            assert [job.job_id for job in listed] == newest_first
        assert [job.job_id for job in client.iter_jobs(status="open")] == [still_open]
        assert [job.job_id for job in client.iter_jobs(status="closed")] == newest_first[1:]
        assert [job.job_id for job in client.iter_jobs(job_type="regular")] == newest_first
        assert list(client.iter_jobs(job_type="scheduled")) == []
        assert list(client.iter_jobs(status="deleted")) == []
        assert client.get_job(made[0]).data.latest_run is not None
        finish(client.job(made[0]))
        again = client.job(made[0]).rerun()
        one = client.list_runs(made[0], limit=1)
        assert [run.run_id for run in one.runs] == [again.run_id]
        two = client.list_runs(made[0], cursor=one.next_cursor)
        assert [run.run_sequence for run in two.runs] == [1]
        assert [run.run_id for run in client.iter_runs(made[0])][:1] == [again.run_id]


def test_idempotency_keys_make_one_of_two_calls(client: ZenRowsBatchClient) -> None:
    first = client.submit_regular(pages(1, "once"), idempotency_key="submit-1")
    again = client.submit_regular(pages(1, "once"), idempotency_key="submit-1")
    assert again.job_id == first.job_id
    finish(first)
    late = client.submit_regular(pages(1, "once"), idempotency_key="submit-1")
    assert late.submit_response == first.submit_response
    refused(
        Code.IDEMPOTENCY_KEY_CONFLICT,
        409,
        lambda: client.submit_regular(pages(2, "once"), idempotency_key="submit-1"),
    )
    assert first.rerun(idempotency_key="r").run_id == first.rerun(idempotency_key="r").run_id
    job = client.submit_open()
    for _ in range(2):
        answer = job.add_tasks(added([target("once/added")]), idempotency_key="add")
        assert answer.latest_run.stats.total == 1
    job.close()
    finish(job)


def test_refusals_carry_their_code(client: ZenRowsBatchClient, server: Serving) -> None:
    done = client.submit_regular(pages(1, "codes"))
    finish(done)
    held = client.submit_open(pages(1, "held"))
    more = added([target("more")])
    running = client.submit_open(pages(1, "running", delay=60))
    stopped = client.submit_open()
    stopped.run.stop()
    too_many = added(pages(OPEN_JOB_TASKS, "many"))

    missing = client.job(NOWHERE)
    for act in (missing.load, missing.close, missing.rerun, missing.run.stop, missing.delete):
        refused(Code.NOT_FOUND, 404, act)
    refused(Code.NOT_FOUND, 404, lambda: missing.add_tasks(more))
    refused(Code.NOT_FOUND, 404, lambda: client.run(done.job_id, NOWHERE).delete())
    refused(Code.NOT_FOUND, 404, lambda: done.run.task_history(NOWHERE))
    refused(Code.JOB_NOT_OPEN, 409, lambda: done.add_tasks(more))
    refused(Code.RUN_NOT_TERMINAL, 409, running.rerun)
    refused(Code.RUN_NOT_STOPPABLE, 409, done.run.stop)
    refused(Code.CONFLICT, 409, done.run.pause)
    refused(Code.CONFLICT, 409, stopped.run.resume)
    refused(Code.NO_MATCHING_TASKS, 409, done.retry_failed)
    refused(Code.QUOTA_EXCEEDED, 429, lambda: held.add_tasks(too_many))
    refused(Code.INVALID_ARGUMENT, 400, lambda: done.rerun(status="nonsense"))
    refused(Code.INVALID_ARGUMENT, 400, lambda: client.list_jobs(limit=101))
    refused(Code.INVALID_ARGUMENT, 400, lambda: client.list_jobs(cursor="nonsense"))
    refused(Code.INVALID_ARGUMENT, 400, lambda: client.list_results(done.job_id, status="odd"))
    bad = refused(
        Code.INVALID_ARGUMENT,
        400,
        lambda: client.submit_regular(
            ["ftp://files.test/", target("good"), {"url": target("x"), "metadata": {"\n": "v"}}]
        ),
    )
    assert bad.problem is not None
    assert bad.problem.extras is not None
    assert [(task["index"], task["reason"]) for task in bad.problem.extras["invalid_tasks"]] == [
        (0, Code.UNSUPPORTED_SCHEME),
        (2, Code.METADATA_KEY_INVALID),
    ]
    with open_client(server, "two words") as stranger:
        refused(Code.UNAUTHENTICATED, 401, stranger.list_jobs)


def walk_webhook(caller: Caller, path: str) -> None:
    hook = {"url": "https://93.184.216.34/hook", "signature": True}
    caller.http.put(f"{path}/webhook", json=hook)
    caller.http.get(f"{path}/webhook")
    caller.get(path)
    caller.http.delete(f"{path}/webhook")


def test_every_success_of_every_route_parses_in_its_model(server: Serving) -> None:
    seen: set[tuple[str, str]] = set()

    def note(response: httpx.Response) -> None:
        support_models.check(response)
        assert response.is_success, response.text
        seen.add(support_models.route_of(response.request))

    with Caller(server.api) as caller:
        caller.http.event_hooks = {"response": [note]}
        job = caller.submit(target("walk"), target("walk/bad", status=404), status="open", name="n")
        path, run_path = f"/jobs/{job['job_id']}", f"/jobs/{job['job_id']}/runs"
        caller.http.post(f"{path}/pause")
        caller.http.post(f"{path}/tasks", json={"tasks": [{"url": target("walk/more")}]})
        caller.http.post(f"{path}/resume")
        caller.http.post(f"{path}/close")
        first = caller.wait(job)
        [row, *_] = caller.results(job, limit=1)
        for start in (path, f"{run_path}/{first['run_id']}"):
            caller.get(f"{start}/results", status="all")
            caller.get(f"{start}/tasks/{row['task_id']}/history")
        caller.get("/jobs", limit=1)
        caller.get(run_path)
        caller.get(f"{run_path}/{first['run_id']}")
        caller.http.post(f"{path}/rerun", params={"status": "failed"})
        second = caller.wait(job)
        caller.http.delete(f"{run_path}/{second['run_id']}")
        slow = caller.submit(target("walk/slow", delay=60))
        caller.http.post(f"/jobs/{slow['job_id']}/stop")
        caller.http.post(f"/jobs/{slow['job_id']}/cancel")
        caller.http.delete(f"/jobs/{slow['job_id']}")
        _walk_schedules(caller)
        caller.http.post("/job_inputs", json={"type": "urls"})
        export = caller.http.post(f"{run_path}/{first['run_id']}/exports").json()
        caller.get(f"{run_path}/{first['run_id']}/exports/{export['export_id']}")
        _walk_signing_keys(caller)
        walk_webhook(caller, path)
        if isinstance(server, Booted):
            # No receiver that production would post to is within reach.
            caller.http.post("/webhook/test", json={"url": f"{server.origin}/_dev/inbox/walked"})
    unseen = set() if isinstance(server, Booted) else {("POST", "/v1/webhook/test")}
    assert seen == set(support_models.MODELS) - unseen


def _walk_schedules(caller: Caller) -> None:
    nightly = {"calendar": {"times_of_day": ["03:00"], "cadence": {"daily": {}}}}
    planned = caller.submit(
        target("walk/planned"), type="scheduled", schedule={**nightly, "timezone": "UTC"}
    )
    hourly = {"rate": {"every": 1, "unit": "hour"}}
    caller.http.put(f"/jobs/{planned['job_id']}/schedule", json=hourly)
    caller.http.post(f"/jobs/{planned['job_id']}/schedule/state", json={"schedule_state": "paused"})


def _walk_signing_keys(caller: Caller) -> None:
    for _ in range(2):
        caller.http.post("/hmac/keys/rotate")
    caller.get("/hmac/keys")
    caller.http.post("/hmac/keys/rotate/finalize")
    caller.http.delete("/hmac/keys/rotate")
