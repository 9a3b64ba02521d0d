"""The public client holds, ends, repeats and deletes runs, and changes its signing keys."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from zenrows.batch import BatchAPIError, ZenRowsBatchClient
from zenrows.batch._waiters import RunPaused, WaiterTimeout
from zenrows.batch.errors import BatchErrorCode as Code
from zenrows.batch.models import FailureReason, JobStatus, PauseState, RunStatus, TaskStatus

from conveyor.gateway.fake import expected_body
from tests.acceptance.support_bindings import Serving, bodies
from tests.acceptance.support_calls import problem_of
from tests.acceptance.support_client import (
    added,
    finish,
    open_client,
    pages,
    refused,
)
from tests.acceptance.support_wire import eventually, target
from tests.patient import SECONDS, fetched


def test_stop_ends_a_run_and_is_idempotent(client: ZenRowsBatchClient) -> None:
    job = client.submit_regular(pages(3, "stop", delay=60))
    stopped = job.run.stop()
    assert stopped.status is RunStatus.STOPPED
    assert job.run.stop().data.updated_at == stopped.data.updated_at
    assert job.run.cancel().status is RunStatus.STOPPED
    assert stopped.stats.completed == 0
    assert {row.status for row in job.run.results()} <= {TaskStatus.PENDING, TaskStatus.PROCESSING}
    other = client.submit_regular(pages(1, "cancel", delay=60))
    assert other.run.cancel().status is RunStatus.STOPPED


def test_pause_holds_a_run_and_resume_lets_it_go_on(client: ZenRowsBatchClient) -> None:
    job = client.submit_open()
    assert job.run.pause().data.pause_state is PauseState.PAUSED
    assert job.run.pause().data.pause_state is PauseState.PAUSED
    job.add_tasks(added(pages(3, "pause"), last_batch=True))
    with pytest.raises(RunPaused) as caught:
        job.run.wait(timeout=SECONDS, poll_interval=0.05)
    assert caught.value.run.stats.completed == 0
    with pytest.raises(WaiterTimeout):
        job.run.wait(timeout=0.3, poll_interval=0.05, wait_while_paused=True)
    assert [row.status for row in job.run.results()] == [TaskStatus.PENDING] * 3
    assert job.run.resume().data.pause_state is None
    finish(job)
    assert job.run.load().stats.successful == 3


def test_a_rerun_does_everything_again(client: ZenRowsBatchClient) -> None:
    job = client.submit_regular(pages(3, "again"))
    finish(job)
    before = list(job.run.results())
    again = job.rerun(wait_for_ingest=True)
    assert again.data.run_sequence == 2
    again.wait(timeout=30, poll_interval=0.05)
    after = list(again.results())
    assert [row.task_id for row in after] == [row.task_id for row in before]
    assert {row.run_id for row in after} == {again.run_id}
    assert all(row.source_run_id is None for row in after)
    runs = list(job.runs(page_size=1))
    assert [run.data.run_sequence for run in runs] == [2, 1]
    assert client.get_run(job.job_id, run_id=runs[1].run_id).status is RunStatus.COMPLETED


def test_retrying_what_failed_keeps_what_succeeded(client: ZenRowsBatchClient) -> None:
    job = client.submit_regular([target("kept"), target("retried", flaky=4)])
    finish(job)
    first = job.run.load()
    assert (first.stats.successful, first.stats.failed) == (1, 1)
    second = job.retry_failed()
    second.wait(timeout=30, poll_interval=0.05)
    kept, retried = second.results()
    assert (kept.source_run_id, retried.source_run_id) == (first.run_id, None)
    assert second.load().stats.successful == 2
    assert second.download_task_to_memory(kept) == expected_body(target("kept"))
    assert client.run(job.job_id, second.run_id).load().data.trigger is not None


def test_a_stopped_run_is_taken_up_again(client: ZenRowsBatchClient) -> None:
    job = client.submit_open()
    job.run.pause()
    job.add_tasks(added(pages(4, "stopped")))
    job.run.stop()
    rest = job.retry_failed(include_pending=True)
    rest.wait(timeout=30, poll_interval=0.05)
    assert (rest.load().stats.total, rest.load().stats.successful) == (4, 4)
    assert job.load().status is JobStatus.CLOSED


def test_an_account_refusal_fails_the_run(client: ZenRowsBatchClient) -> None:
    job = client.submit_regular([target("refused", account="api_key_cap_reached", detail="Full.")])
    run = job.run.wait(timeout=30, poll_interval=0.05)
    assert run.status is RunStatus.FAILED
    assert run.data.failure_reason is FailureReason.API_KEY_CAP_REACHED
    assert run.data.failure_detail == "Full."


def test_deleting_a_run_and_a_job(client: ZenRowsBatchClient, server: Serving) -> None:
    job = client.submit_regular(pages(2, "deleted"))
    finish(job)
    first = job.run.load()
    second = job.rerun()
    second.wait(timeout=30, poll_interval=0.05)
    [link, _] = [row.result_url for row in first.results()]
    client.run(job.job_id, first.run_id).delete()
    assert first.load().status is RunStatus.DELETED
    refused(Code.NOT_FOUND, 404, lambda: list(first.results()))
    assert [run.run_id for run in job.runs()] == [second.run_id]
    job.delete()
    job.delete()
    refused(Code.NOT_FOUND, 404, job.rerun)
    assert job.job_id not in {other.job_id for other in client.iter_jobs(page_size=100)}
    assert link is not None
    problem_of(fetched(link), status=404, code="not_found")

    def gone() -> BatchAPIError | None:
        try:
            assert job.load().status is JobStatus.DELETED
        except BatchAPIError as error:
            return error
        return None

    assert eventually(gone, "the job is gone").code == Code.NOT_FOUND
    refused(Code.NOT_FOUND, 404, job.delete)
    assert bodies(server, job.job_id) == []


def test_a_wait_for_a_run_ends_when_its_job_is_deleted(client: ZenRowsBatchClient) -> None:
    job = client.submit_open()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(job.run.wait, timeout=30, poll_interval=0.05)
        job.delete()
        ended = waiting.result()
    assert ended.status is RunStatus.DELETED
    assert job.run.load().status is RunStatus.DELETED


def test_a_run_that_another_draws_on_cannot_be_deleted(client: ZenRowsBatchClient) -> None:
    job = client.submit_regular([target("source"), target("source/bad", status=404)])
    finish(job)
    first = job.run.load()
    second = job.retry_failed()
    second.wait(timeout=30, poll_interval=0.05)
    refused(Code.RUN_HAS_DESCENDANTS, 409, first.delete)
    second.delete()
    first.delete()
    refused(Code.NO_PRIOR_RUN, 409, job.rerun)
    assert list(job.runs()) == []


def test_signing_keys_are_rotated(server: Serving) -> None:
    # By a caller of its own: other tests rotate keys of a fleet that they share with this one.
    with open_client(server, "a-caller-with-keys") as client:
        first, second = client.rotate_hmac_key(), client.rotate_hmac_key()
        keys = client.list_hmac_keys()
        assert keys.active is not None
        assert keys.candidate is not None
        assert (keys.active.kid, keys.candidate.kid) == (first.kid, second.kid)
        refused(Code.CANDIDATE_PENDING, 409, client.rotate_hmac_key)

        client.cancel_hmac_rotation()
        refused(Code.NO_CANDIDATE, 409, client.finalize_hmac_key)
        third = client.rotate_hmac_key()

        assert client.finalize_hmac_key().active_kid == third.kid
        keys = client.list_hmac_keys()
        assert (keys.active and keys.active.kid, keys.candidate) == (third.kid, None)
