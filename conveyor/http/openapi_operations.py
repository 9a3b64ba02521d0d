"""What our OpenAPI document says of each route."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path. `errors` are statuses beyond those that any operation may answer.

    `media_type` None: the answer is empty. `uploads` are the types of a file that the body may be.
    `later`: the answer is 202, and otherwise the same, where the rows of a run come after it.
    """

    method: str
    path: str
    id: str
    summary: str
    success: int = 200
    later: bool = False
    answer: str | None = None
    media_type: str | None = "application/json"
    body: str | None = None
    uploads: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    errors: tuple[int, ...] = ()
    open: bool = False


_JOB = "/v1/jobs/{job_id}"
_RUN = "/v1/jobs/{job_id}/runs/{run_id}"

_ON_JOBS = (
    Operation(
        method="post",
        path="/v1/jobs",
        id="submitJob",
        summary="Create a job and its first run",
        success=201,
        later=True,
        answer="Submitted",
        body="SubmitJob",
        parameters=("IdempotencyKey",),
        errors=(400, 404, 409, 413, 415, 429, 501),
    ),
    Operation(
        method="get",
        path="/v1/jobs",
        id="listJobs",
        summary="List your jobs, newest first",
        answer="JobsPage",
        parameters=("JobStatus", "JobType", "Limit", "Cursor"),
        errors=(400,),
    ),
    Operation(
        method="get", path=_JOB, id="getJob", summary="Read a job", answer="Job", errors=(404,)
    ),
    Operation(
        method="delete",
        path=_JOB,
        id="deleteJob",
        summary="Delete a job; its bodies and rows are scrubbed soon after",
        success=202,
        errors=(404,),
    ),
    Operation(
        method="post",
        path=f"{_JOB}/tasks",
        id="addTasks",
        summary="Add tasks to an open job",
        answer="TasksAdded",
        body="AddTasks",
        parameters=("IdempotencyKey",),
        errors=(400, 404, 409, 413, 415, 429),
    ),
    Operation(
        method="post",
        path=f"{_JOB}/close",
        id="closeJob",
        summary="Close an open job: no task comes any more",
        answer="Job",
        errors=(404,),
    ),
    Operation(
        method="post",
        path=f"{_JOB}/stop",
        id="stopJob",
        summary="Stop the latest run at once; calls in flight may still end",
        answer="Run",
        errors=(404, 409),
    ),
    Operation(
        method="post",
        path=f"{_JOB}/cancel",
        id="cancelJob",
        summary="The same as stop",
        answer="Run",
        errors=(404, 409),
    ),
    Operation(
        method="post",
        path=f"{_JOB}/pause",
        id="pauseJob",
        summary="Hold the latest run",
        answer="Run",
        errors=(404, 409),
    ),
    Operation(
        method="post",
        path=f"{_JOB}/resume",
        id="resumeJob",
        summary="Let a paused run go on",
        answer="Run",
        errors=(404, 409),
    ),
    Operation(
        method="post",
        path=f"{_JOB}/rerun",
        id="rerunJob",
        summary="Make a new run of the latest one: all of it, or only tasks in some states",
        success=201,
        later=True,
        answer="Rerun",
        parameters=("RerunStatus", "IdempotencyKey"),
        errors=(400, 404, 409),
    ),
)

_ON_RUNS = (
    Operation(
        method="get",
        path=f"{_JOB}/runs",
        id="listRuns",
        summary="List a job's runs, newest first",
        answer="RunsPage",
        parameters=("Limit", "Cursor"),
        errors=(400, 404),
    ),
    Operation(
        method="get", path=_RUN, id="getRun", summary="Read a run", answer="Run", errors=(404,)
    ),
    Operation(
        method="delete",
        path=_RUN,
        id="deleteRun",
        summary="Delete a run, unless a newer run draws on its bodies",
        success=202,
        errors=(404, 409),
    ),
)


def _of_both_runs(path: str, operation_id: str, summary: str, **more: Any) -> list[Operation]:
    """The same operation on the latest run and on a named one."""
    return [
        Operation(
            method="get",
            path=_JOB + path,
            id=f"{operation_id}OfLatestRun",
            summary=f"{summary} (latest run)",
            **more,
        ),
        Operation(
            method="get",
            path=_RUN + path,
            id=f"{operation_id}OfRun",
            summary=f"{summary} (named run)",
            **more,
        ),
    ]


_ON_RESULTS = (
    *_of_both_runs(
        "/results",
        "listResults",
        "List results in submission order",
        answer="ResultsPage",
        parameters=("ResultStatus", "ResultLimit", "Cursor"),
        errors=(400, 404),
    ),
    *_of_both_runs(
        "/tasks/{task_id}/content",
        "readContent",
        "Read the body that a task brought back, in its own content type",
        media_type="*/*",
        errors=(404, 409, 410, 422),
    ),
    *_of_both_runs(
        "/tasks/{task_id}/history",
        "readHistory",
        "Read the attempts at a task",
        answer="History",
        errors=(404,),
    ),
    Operation(
        method="get",
        path="/v1/blobs/{job_id}/{run_id}/{task_id}",
        id="followLink",
        summary="Read a body by a signed link, as found in result_url",
        media_type="*/*",
        parameters=("Expires", "Signature"),
        errors=(400, 404, 410, 422),
        open=True,
    ),
)


def _reserved(method: str, path: str, operation_id: str) -> Operation:
    return Operation(
        method=method,
        path=path,
        id=operation_id,
        summary="Reserved: not implemented yet",
        success=501,
        errors=(404,) if "{job_id}" in path else (),
    )


_RESERVED = (
    _reserved("put", f"{_JOB}/schedule", "replaceSchedule"),
    _reserved("post", f"{_JOB}/schedule/state", "setScheduleState"),
    _reserved("get", f"{_JOB}/webhook", "getWebhook"),
    _reserved("put", f"{_JOB}/webhook", "replaceWebhook"),
    _reserved("delete", f"{_JOB}/webhook", "deleteWebhook"),
    _reserved("get", "/v1/hmac/keys", "listKeys"),
    _reserved("post", "/v1/hmac/keys/rotate", "rotateKey"),
    _reserved("delete", "/v1/hmac/keys/rotate", "cancelRotation"),
    _reserved("post", "/v1/hmac/keys/rotate/finalize", "finalizeRotation"),
    _reserved("post", "/v1/webhook/test", "testWebhook"),
)

_ON_SERVER = (
    Operation(
        method="get",
        path="/healthz",
        id="health",
        summary="Whether the process is alive",
        answer="ServerStatus",
        open=True,
    ),
    Operation(
        method="get",
        path="/readyz",
        id="readiness",
        summary="Whether the server takes requests",
        answer="ServerStatus",
        open=True,
    ),
    Operation(
        method="get",
        path="/metrics",
        id="metrics",
        summary="Metrics in the text format of Prometheus",
        media_type="text/plain",
        open=True,
    ),
    Operation(
        method="get",
        path="/openapi.json",
        id="describe",
        summary="This document",
        media_type="application/json",
        open=True,
    ),
)

OPERATIONS = _ON_JOBS + _ON_RUNS + _ON_RESULTS + _RESERVED + _ON_SERVER
"""Every operation that the server has, HEAD apart, which goes wherever GET goes."""
