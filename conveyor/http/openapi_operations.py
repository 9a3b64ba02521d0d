"""The operations and parameters of the OpenAPI document."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from conveyor.domain.errors import ErrorCode
from conveyor.domain.model import JobStatus
from conveyor.http.openapi_schemas import Schema
from conveyor.http.request import MAX_LENGTH as MAX_KEY
from conveyor.service import results
from conveyor.service.jobs import DEFAULT_PAGE, JOB_TYPES, MAX_PAGE
from conveyor.service.schemas import TASK_ID_PATTERN, ULID_PATTERN


def _query(name: str, description: str, schema: Schema, *, required: bool = False) -> Schema:
    return {
        "name": name,
        "in": "query",
        "required": required,
        "description": description,
        "schema": schema,
    }


def _in_path(name: str, description: str, pattern: str) -> Schema:
    return {
        "name": name,
        "in": "path",
        "required": True,
        "description": description,
        "schema": {"type": "string", "pattern": pattern},
    }


def _page_size(default: int, most: int) -> Schema:
    schema = {"type": "integer", "minimum": 1, "maximum": most, "default": default}
    return _query("limit", "Most entries on a page.", schema)


STREAM_TYPE = "text/event-stream"
_STATES = "(pending|processing|failed|successful)"

PARAMETERS: dict[str, Schema] = {
    "job_id": _in_path("job_id", "A job.", ULID_PATTERN),
    "run_id": _in_path("run_id", "A run.", ULID_PATTERN),
    "export_id": _in_path("export_id", "An export.", ULID_PATTERN),
    "task_id": _in_path("task_id", "A task.", TASK_ID_PATTERN),
    "Cursor": _query(
        "cursor",
        "Where to go on: the `next_cursor` of the page before. Empty is none.",
        {"type": "string"},
    ),
    "Limit": _page_size(DEFAULT_PAGE, MAX_PAGE),
    "ResultLimit": _page_size(results.DEFAULT_PAGE, results.MAX_PAGE),
    "JobStatus": _query(
        "status",
        "Only jobs in this state. Without it, all that are not deleted.",
        {"type": "string", "enum": [status.value for status in JobStatus]},
    ),
    "JobType": _query(
        "type", "Only jobs of this type.", {"type": "string", "enum": list(JOB_TYPES)}
    ),
    "ResultStatus": _query(
        "status",
        "Only these tasks. `processing` means all that have not ended.",
        {"type": "string", "enum": list(results.FILTERS), "default": "all"},
    ),
    "FailureGroup": _query(
        "group",
        "Only tasks of these failure groups, as a comma list; needs `status=failed`.",
        {"type": "string", "pattern": "^[^,]+(,[^,]+)*$"},
    ),
    "RerunStatus": _query(
        "status",
        "The states of the tasks to redo, as a comma list; the others are inherited. "
        "Without it everything is redone.",
        {"type": "string", "pattern": f"^{_STATES}(,{_STATES})*$"},
    ),
    "Expires": _query(
        "expires",
        "The end of the link, in seconds since the epoch.",
        {"type": "string"},
        required=True,
    ),
    "Signature": _query("signature", "What makes it valid.", {"type": "string"}, required=True),
    "Redirect": _query(
        "redirect",
        "With 1, the answer may be 307 to where the store serves the body, for a minute.",
        {"type": "string", "enum": ["0", "1"]},
    ),
    "HeldHosts": _query(
        "held",
        "With 1, only the hosts with limits for which tasks of a running run wait, those with the "
        "most first.",
        {"type": "string", "enum": ["0", "1"]},
    ),
    "LastEventId": {
        "name": "Last-Event-ID",
        "in": "header",
        "required": False,
        "description": "The id of the event that was seen last; what is no number counts as none.",
        "schema": {"type": "string"},
    },
    "IdempotencyKey": {
        "name": "Idempotency-Key",
        "in": "header",
        "required": False,
        "description": (
            "Makes the request safe to repeat for a day: the same key with the same body gets "
            "the same answer, byte for byte, with `Idempotency-Replayed: true`. While the first "
            "request runs, or with another body, the answer is 409."
        ),
        "schema": {"type": "string", "minLength": 1, "maxLength": MAX_KEY},
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path.

    `refusals` are its error codes beyond those of any operation. `note` describes its answers. With
    `fails_as_task` the answer is 422 with the task's own problem if the task failed. `media_type`
    None means an empty answer. With `redirects` the answer may be 307, to where the store serves
    the body. `uploads` are the media types of a file as the body. With `later` the answer is 202,
    and otherwise the same, if the rows of a run are written after it.
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
    note: str = ""
    refusals: tuple[ErrorCode, ...] = ()
    fails_as_task: bool = False
    redirects: bool = False
    open: bool = False


_JOB = "/v1/jobs/{job_id}"
_RUN = "/v1/jobs/{job_id}/runs/{run_id}"

_ON_JOBS = (
    Operation(
        method="post",
        path="/v1/jobs",
        id="submitJob",
        summary="Create a job, and its first run unless it is scheduled",
        success=201,
        later=True,
        answer="Submitted",
        body="SubmitJob",
        parameters=("IdempotencyKey",),
        note="201 where the rows are written or the job is scheduled, 202 where rows follow.",
        refusals=(
            ErrorCode.INVALID_ARGUMENT,
            ErrorCode.FILE_INPUT_NOT_FOUND,
            ErrorCode.FILE_INPUT_NOT_UPLOADED,
            ErrorCode.FILE_INPUT_UNSUPPORTED_FOR_JOB_TYPE,
            ErrorCode.CALLBACK_URL_MUST_BE_HTTPS,
            ErrorCode.CALLBACK_URL_UNRESOLVABLE,
            ErrorCode.WEBHOOK_SIGNING_REQUIRES_ACTIVE_KEY,
            ErrorCode.QUOTA_EXCEEDED,
            ErrorCode.IDEMPOTENCY_KEY_CONFLICT,
            ErrorCode.PAYLOAD_TOO_LARGE,
            ErrorCode.UNSUPPORTED_MEDIA_TYPE,
        ),
    ),
    Operation(
        method="get",
        path="/v1/jobs",
        id="listJobs",
        summary="List your jobs, newest first",
        answer="JobsPage",
        parameters=("JobStatus", "JobType", "Limit", "Cursor"),
        refusals=(ErrorCode.INVALID_ARGUMENT,),
    ),
    Operation(
        method="get",
        path=_JOB,
        id="getJob",
        summary="Read a job",
        answer="Job",
        note="A deleted job is a tombstone until it is gone.",
        refusals=(ErrorCode.NOT_FOUND,),
    ),
    Operation(
        method="delete",
        path=_JOB,
        id="deleteJob",
        summary="Delete a job; its bodies and rows are scrubbed soon after",
        success=202,
        note="Idempotent while the tombstone stands.",
        refusals=(ErrorCode.NOT_FOUND,),
    ),
    Operation(
        method="post",
        path=f"{_JOB}/tasks",
        id="addTasks",
        summary="Add tasks to an open job",
        answer="TasksAdded",
        body="AddTasks",
        parameters=("IdempotencyKey",),
        refusals=(
            ErrorCode.INVALID_ARGUMENT,
            ErrorCode.NOT_FOUND,
            ErrorCode.JOB_NOT_OPEN,
            ErrorCode.LAST_BATCH_RECEIVED,
            ErrorCode.RUN_NOT_TERMINAL,
            ErrorCode.QUOTA_EXCEEDED,
            ErrorCode.IDEMPOTENCY_KEY_CONFLICT,
            ErrorCode.PAYLOAD_TOO_LARGE,
            ErrorCode.UNSUPPORTED_MEDIA_TYPE,
        ),
    ),
    Operation(
        method="post",
        path=f"{_JOB}/close",
        id="closeJob",
        summary="Close an open job: no task comes any more",
        answer="Job",
        note="Idempotent; `job_not_open` on a scheduled job.",
        refusals=(ErrorCode.NOT_FOUND, ErrorCode.JOB_NOT_OPEN),
    ),
    Operation(
        method="post",
        path=f"{_JOB}/stop",
        id="stopJob",
        summary="Stop the latest run at once; calls in flight may still end",
        answer="Run",
        note="Idempotent on a stopped run.",
        refusals=(ErrorCode.NOT_FOUND, ErrorCode.RUN_NOT_STOPPABLE, ErrorCode.NO_PRIOR_RUN),
    ),
    Operation(
        method="post",
        path=f"{_JOB}/cancel",
        id="cancelJob",
        summary="The same as stop",
        answer="Run",
        refusals=(ErrorCode.NOT_FOUND, ErrorCode.RUN_NOT_STOPPABLE, ErrorCode.NO_PRIOR_RUN),
    ),
    Operation(
        method="post",
        path=f"{_JOB}/pause",
        id="pauseJob",
        summary="Hold the latest run",
        answer="Run",
        note="Idempotent; `conflict` on a run that has ended.",
        refusals=(ErrorCode.NOT_FOUND, ErrorCode.CONFLICT, ErrorCode.NO_PRIOR_RUN),
    ),
    Operation(
        method="post",
        path=f"{_JOB}/resume",
        id="resumeJob",
        summary="Let a paused run go on",
        answer="Run",
        note="Idempotent; `conflict` on a run that has ended.",
        refusals=(ErrorCode.NOT_FOUND, ErrorCode.CONFLICT, ErrorCode.NO_PRIOR_RUN),
    ),
    Operation(
        method="post",
        path=f"{_JOB}/rerun",
        id="rerunJob",
        summary="Make a new run of the latest one: all of it, or only tasks in some states",
        success=201,
        later=True,
        answer="Rerun",
        parameters=("RerunStatus", "FailureGroup", "IdempotencyKey"),
        note=(
            "201 where the rows are written, 202 where they follow; a `status` makes it partial. "
            "A scheduled job without a run gets one of its list."
        ),
        refusals=(
            ErrorCode.INVALID_ARGUMENT,
            ErrorCode.NOT_FOUND,
            ErrorCode.RUN_NOT_TERMINAL,
            ErrorCode.NO_PRIOR_RUN,
            ErrorCode.NO_MATCHING_TASKS,
            ErrorCode.PARTIAL_RERUN_WINDOW_EXPIRED,
            ErrorCode.QUOTA_EXCEEDED,
            ErrorCode.IDEMPOTENCY_KEY_CONFLICT,
        ),
    ),
)

_ON_RUNS = (
    Operation(
        method="get",
        path=f"{_JOB}/runs",
        id="listJobRuns",
        summary="List a job's runs, newest first",
        answer="RunsPage",
        parameters=("Limit", "Cursor"),
        refusals=(ErrorCode.INVALID_ARGUMENT, ErrorCode.NOT_FOUND),
    ),
    Operation(
        method="get",
        path=_RUN,
        id="getJobRun",
        summary="Read a run",
        answer="Run",
        note="A deleted run is a tombstone until it is gone.",
        refusals=(ErrorCode.NOT_FOUND,),
    ),
    *(
        Operation(
            method="get",
            path=path,
            id=id,
            summary=summary,
            media_type=STREAM_TYPE,
            parameters=("LastEventId",),
            note=note,
            refusals=refusals,
        )
        for path, id, summary, note, refusals in (
            (
                f"{_RUN}/events",
                "streamJobRun",
                "Follow a run by server-sent events, until it has ended",
                "`run` has the run as GET shows it, at once and after changes; then `end`.",
                (ErrorCode.NOT_FOUND,),
            ),
            (
                "/v1/events",
                "streamRuns",
                "Follow the runs that changed last by server-sent events",
                "As for one run, and without an end. `reset` says that some changes were missed.",
                (),
            ),
        )
    ),
    Operation(
        method="delete",
        path=_RUN,
        id="deleteJobRun",
        summary="Delete a run, unless a newer run draws on its bodies",
        success=202,
        note="Idempotent.",
        refusals=(ErrorCode.NOT_FOUND, ErrorCode.RUN_HAS_DESCENDANTS),
    ),
)


def _of_both_runs(path: str, verb: str, noun: str, summary: str, **more: Any) -> list[Operation]:
    """Build the same operation for the latest run and for a named one."""
    return [
        Operation(
            method="get",
            path=_JOB + path,
            id=f"{verb}LatestRun{noun}",
            summary=f"{summary} (latest run)",
            **more,
        ),
        Operation(
            method="get",
            path=_RUN + path,
            id=f"{verb}Run{noun}",
            summary=f"{summary} (named run)",
            **more,
        ),
    ]


_ON_RESULTS = (
    *_of_both_runs(
        "/results",
        "list",
        "Results",
        "List results in submission order",
        answer="ResultsPage",
        parameters=("ResultStatus", "FailureGroup", "ResultLimit", "Cursor"),
        note="`no_matching_tasks` for a group that the run does not have.",
        refusals=(
            ErrorCode.INVALID_ARGUMENT,
            ErrorCode.NOT_FOUND,
            ErrorCode.NO_MATCHING_TASKS,
        ),
    ),
    Operation(
        method="get",
        path=f"{_RUN}/failures",
        id="getRunFailures",
        summary="Read the failed tasks of a run by kind, the most frequent kind first",
        answer="Failures",
        refusals=(ErrorCode.NOT_FOUND,),
    ),
    Operation(
        method="get",
        path=f"{_RUN}/hosts",
        id="getRunHosts",
        summary="Read what a run does to each host, the busiest hosts first",
        answer="RunHosts",
        parameters=("HeldHosts",),
        refusals=(ErrorCode.NOT_FOUND, ErrorCode.INVALID_ARGUMENT),
    ),
    *_of_both_runs(
        "/tasks/{task_id}/content",
        "get",
        "TaskContent",
        "Read the body that a task brought back, in its own content type",
        media_type="*/*",
        note="422 with the task's own problem where the task failed.",
        fails_as_task=True,
        refusals=(ErrorCode.NOT_FOUND, ErrorCode.TASK_NOT_READY, ErrorCode.RESULT_EXPIRED),
    ),
    *_of_both_runs(
        "/tasks/{task_id}/history",
        "get",
        "TaskHistory",
        "Read the attempts at a task",
        answer="History",
        refusals=(ErrorCode.NOT_FOUND,),
    ),
    Operation(
        method="get",
        path="/v1/blobs/{job_id}/{run_id}/{task_id}",
        id="followLink",
        summary="Read a body by a signed link, as found in result_url",
        media_type="*/*",
        parameters=("Expires", "Signature", "Redirect"),
        redirects=True,
        note=(
            "422 with the task's own problem where the task failed; `permission_denied` "
            "for a link that is forged or has expired."
        ),
        fails_as_task=True,
        refusals=(ErrorCode.INVALID_ARGUMENT, ErrorCode.NOT_FOUND, ErrorCode.RESULT_EXPIRED),
        open=True,
    ),
)


_ON_KEYS = (
    Operation(
        method="get",
        path="/v1/hmac/keys",
        id="listHMACKeys",
        summary="List your signing keys, without their secrets",
        answer="HMACKeyList",
    ),
    Operation(
        method="post",
        path="/v1/hmac/keys/rotate",
        id="rotateHMACKey",
        summary="Make your first signing key, or a candidate beside the active one",
        success=201,
        answer="HMACKeyCreated",
        note="`secret` is in this answer alone.",
        refusals=(ErrorCode.CANDIDATE_PENDING,),
    ),
    Operation(
        method="delete",
        path="/v1/hmac/keys/rotate",
        id="cancelHMACRotation",
        summary="Remove the candidate, if there is one",
        success=204,
        media_type=None,
    ),
    Operation(
        method="post",
        path="/v1/hmac/keys/rotate/finalize",
        id="finalizeHMACKey",
        summary="Let the candidate take the place of the active key",
        answer="HMACKeyFinalized",
        refusals=(ErrorCode.NO_CANDIDATE,),
    ),
)


_ON_SCHEDULES = (
    Operation(
        method="get",
        path=f"{_JOB}/schedule",
        id="getJobSchedule",
        summary="Show the schedule of a job, and its next fires",
        answer="JobSchedule",
        note="`conflict` on a regular job.",
        refusals=(ErrorCode.NOT_FOUND, ErrorCode.CONFLICT),
    ),
    Operation(
        method="put",
        path=f"{_JOB}/schedule",
        id="updateJobSchedule",
        summary="Replace the schedule of a job; a live run goes on",
        answer="Job",
        body="Schedule",
        note="`conflict` on a regular job. The same schedule changes nothing.",
        refusals=(
            ErrorCode.INVALID_ARGUMENT,
            ErrorCode.NOT_FOUND,
            ErrorCode.CONFLICT,
            ErrorCode.PAYLOAD_TOO_LARGE,
            ErrorCode.UNSUPPORTED_MEDIA_TYPE,
        ),
    ),
    Operation(
        method="post",
        path=f"{_JOB}/schedule/state",
        id="updateScheduleState",
        summary="Pause the schedule of a job, or resume it, which fires nothing",
        answer="Job",
        body="ScheduleState",
        note="Idempotent; `conflict` on a regular job.",
        refusals=(
            ErrorCode.INVALID_ARGUMENT,
            ErrorCode.NOT_FOUND,
            ErrorCode.CONFLICT,
            ErrorCode.PAYLOAD_TOO_LARGE,
            ErrorCode.UNSUPPORTED_MEDIA_TYPE,
        ),
    ),
    Operation(
        method="get",
        path=f"{_JOB}/schedule/fires",
        id="listFires",
        summary="List what became of the fires of a job, newest first",
        answer="FiresPage",
        parameters=("Limit", "Cursor"),
        note="`conflict` on a regular job.",
        refusals=(ErrorCode.INVALID_ARGUMENT, ErrorCode.NOT_FOUND, ErrorCode.CONFLICT),
    ),
    Operation(
        method="post",
        path="/v1/schedule/preview",
        id="previewSchedule",
        summary="Show the next fires of a schedule that is not saved",
        answer="SchedulePreview",
        body="Schedule",
        refusals=(
            ErrorCode.INVALID_ARGUMENT,
            ErrorCode.PAYLOAD_TOO_LARGE,
            ErrorCode.UNSUPPORTED_MEDIA_TYPE,
        ),
    ),
)


_ON_SERVER = (
    Operation(
        method="get",
        path="/healthz",
        id="health",
        summary="Whether the process is alive",
        answer="ServerStatus",
        note="200 while the process lives.",
        open=True,
    ),
    Operation(
        method="get",
        path="/readyz",
        id="readiness",
        summary="Whether the server takes requests",
        answer="ServerStatus",
        note=(
            "200 between start and stop, else 503. Beside a role of production `away` "
            "names the services of AWS that do not answer."
        ),
        open=True,
    ),
    Operation(
        method="get",
        path="/metrics",
        id="metrics",
        summary="Metrics in the text format of Prometheus",
        media_type="text/plain",
        note="In production on a port of its own, beside either role.",
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

OPERATIONS = _ON_JOBS + _ON_RUNS + _ON_RESULTS + _ON_KEYS + _ON_SCHEDULES + _ON_SERVER
"""Operations of jobs, runs, results and the server itself; HEAD works wherever GET does."""
