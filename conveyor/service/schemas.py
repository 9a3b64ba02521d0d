"""The schemas of answers. A field of None is left out of the JSON, never null."""

from __future__ import annotations

import msgspec

from conveyor.domain.timestamps import rfc3339
from conveyor.ports.exports import Export


class SpendBody(msgspec.Struct, frozen=True):
    """An indicative cost."""

    credits: int
    cost: float


class StatsBody(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The counters of a run."""

    total: int
    completed: int
    successful: int
    failed: int
    failure_reasons: dict[str, int] | None = None
    spend: SpendBody


class RunBody(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A run. First runs have `last_batch_received`, paused ones `pause_state`, and runs whose rows
    come later `ingest_status`."""

    run_id: str
    job_id: str
    run_sequence: int
    status: str
    trigger: str
    stats: StatsBody
    last_batch_received: bool | None = None
    pause_state: str | None = None
    ingest_status: str | None = None
    created_at: str
    updated_at: str
    failure_reason: str | None = None
    failure_detail: str | None = None


class CallbackBody(msgspec.Struct, frozen=True):
    """The callback named in the submit; `repr` does not show the token."""

    task_token: str

    def __repr__(self) -> str:
        return "CallbackBody(task_token='…')"


class JobBody(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A job with its latest run."""

    job_id: str
    type: str
    status: str
    format: str
    zenrows_params: dict[str, str]
    external_id: str | None = None
    name: str | None = None
    metadata: dict[str, str] | None = None
    max_inflight: int
    priority: int
    max_attempts: int
    result_ttl_days: int
    callback: CallbackBody | None = None
    latest_run: RunBody | None = None
    created_at: str
    updated_at: str


class JobsPage(msgspec.Struct, frozen=True, omit_defaults=True):
    """A page of jobs."""

    jobs: list[JobBody]
    next_cursor: str | None = None


class RunsPage(msgspec.Struct, frozen=True, omit_defaults=True):
    """A page of runs."""

    runs: list[RunBody]
    next_cursor: str | None = None


class SubmitBody(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The answer to a submit."""

    job_id: str
    status: str
    latest_run: RunBody | None = None
    accepted_tasks: int


class AddTasksBody(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to an addition of tasks."""

    accepted_tasks: int
    job_status: str
    latest_run: RunBody


class RerunBody(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a rerun."""

    job_id: str
    status: str
    latest_run: RunBody
    rerun_of: str
    retried_tasks: int
    inherited_tasks: int


class ProblemBody(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The problem of a task, as RFC 9457 writes it."""

    type: str
    title: str
    status: int
    detail: str | None = None
    code: str
    instance: str | None = None


class ResultBody(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """One task in a list of results, without its POST body."""

    task_id: str
    external_id: str | None = None
    run_id: str
    url: str
    metadata: dict[str, str] | None = None
    method: str | None = None
    status: str
    type: str | None = None
    result_url: str | None = None
    error: ProblemBody | None = None
    source_run_id: str | None = None
    created_at: str
    updated_at: str


class ResultsPage(msgspec.Struct, frozen=True, omit_defaults=True):
    """A page of results, in submission order."""

    results: list[ResultBody]
    next_cursor: str | None = None


class EventBody(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One line of a task's history. `kind` is attempt or interruption."""

    started_at: str
    ended_at: str
    attempt: int
    kind: str
    error: ProblemBody | None = None
    spend: SpendBody


class HistoryBody(msgspec.Struct, frozen=True):
    """The history of a task, oldest line first."""

    events: list[EventBody]


class UploadBody(msgspec.Struct, frozen=True):
    """The request that uploads the file: the method, the link, and headers to send exactly as
    given."""

    method: str
    url: str
    headers: dict[str, str]
    expires_at: str


class JobInputBody(msgspec.Struct, frozen=True):
    """A slot; `expires_at` is the end of the slot and of the file in it."""

    file_input_id: str
    upload: UploadBody
    expires_at: str


class StartExportBody(msgspec.Struct, frozen=True, kw_only=True):
    """An export that was just requested."""

    export_id: str
    status: str
    created_at: str
    expires_at: str


class ExportBody(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """An export as a poll sees it. `format` is an addition to the contract."""

    export_id: str
    status: str
    format: str
    error: str | None = None
    download_url: str | None = None
    created_at: str
    expires_at: str


def start_export_body(export: Export) -> StartExportBody:
    """Build the answer for a new export."""
    return StartExportBody(
        export_id=export.export_id,
        status=export.status.value,
        created_at=rfc3339(export.created_at),
        expires_at=rfc3339(export.expires_at),
    )


def export_body(export: Export, *, download_url: str | None) -> ExportBody:
    """Build the answer to a poll."""
    return ExportBody(
        export_id=export.export_id,
        status=export.status.value,
        format=export.format.value,
        error=export.error,
        download_url=download_url,
        created_at=rfc3339(export.created_at),
        expires_at=rfc3339(export.expires_at),
    )
