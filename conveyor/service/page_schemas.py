"""The records of pages, shown as HTML, or as JSON at the same address with `.json` behind it.

A field that a page may lack is UNSET then, and left out of the JSON.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from conveyor.domain.result_shape import ResultShape
from conveyor.service.schemas import (
    DeliveriesPage,
    EventBody,
    ExportBody,
    FailureGroupBody,
    FireRecordBody,
    HostBody,
    JobScheduleBody,
    ProblemBody,
    ResultBody,
    RunBody,
    ScheduleBody,
    WaitBody,
)


class RunPace(msgspec.Struct, frozen=True):
    """Tasks that end in a second, as measured over the last `seconds`."""

    per_second: float
    seconds: int


class JobLine(msgspec.Struct, frozen=True, kw_only=True):
    """A job and one of its runs, as a line of a list."""

    job_id: str
    type: str
    status: str
    priority: int
    name: str | UnsetType = UNSET
    external_id: str | UnsetType = UNSET
    run: RunBody | UnsetType = UNSET
    inherited: int = 0
    pace: RunPace | UnsetType = UNSET
    created_at: str


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is wrong now; `name` is the job's."""

    kind: str
    detail: str
    since: str | UnsetType = UNSET
    job_id: str | UnsetType = UNSET
    run_id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET


class LaneLine(msgspec.Struct, frozen=True, kw_only=True):
    """A run as a worker has it in hand; the id and `name` of its job are there where the run is
    among the latest."""

    run_id: str
    job_id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    in_flight: int
    buffered: int
    permits: int
    ceiling: int
    reason: str | UnsetType = UNSET
    since: str | UnsetType = UNSET
    until: str | UnsetType = UNSET


class WorkerLine(msgspec.Struct, frozen=True, kw_only=True):
    """A worker and the lanes that the reader may see."""

    worker_id: str
    version: str
    started_at: str
    said_at: str
    age_seconds: float
    is_silent: bool
    slots: int
    in_use: int
    away: list[str]
    lanes: list[LaneLine]
    lanes_left_out: int


class WorkersPage(msgspec.Struct, frozen=True):
    """The workers that said a word lately."""

    workers: list[WorkerLine]


class OverviewPage(msgspec.Struct, frozen=True, kw_only=True):
    """The work of now, as it was `at` this instant.

    The live runs that changed last are listed. Figures and troubles are of the `looked` live runs
    that changed last; `is_cut` tells that there are more.
    """

    at: str
    live: list[JobLine]
    looked: int
    is_cut: bool
    ended: list[JobLine]
    troubles: list[Trouble]
    more_troubles: int
    tasks_per_second: float
    calls_in_flight: int
    slots: int
    workers: int
    silent_workers: int
    oldest_waiting: JobLine | UnsetType = UNSET


class JobsFound(msgspec.Struct, frozen=True, kw_only=True):
    """A page of jobs: `looked` were looked through for it."""

    jobs: list[JobLine]
    looked: int
    next_cursor: str | UnsetType = UNSET


class RunsOfAll(msgspec.Struct, frozen=True):
    """Runs of all callers: at most 50 that have work left, and the 20 that changed last."""

    busy: list[JobLine]
    latest: list[JobLine]


class JobPage(msgspec.Struct, frozen=True):
    """A job without a run to show."""

    job: JobLine


class RunPage(msgspec.Struct, frozen=True, kw_only=True):
    """A run, and what belongs to it. `hosts` are those that hold it back by their limits."""

    job: JobLine
    run: RunBody
    is_latest: bool
    waiting_tasks: int
    seconds_left: float | UnsetType = UNSET
    shape: ResultShape
    rerun_of: str | UnsetType = UNSET
    groups: list[FailureGroupBody]
    exports: list[ExportBody]
    runs: list[RunBody]
    has_more_runs: bool
    has_webhook: bool
    has_schedule: bool
    hosts: list[HostBody]
    more_hosts: int


class ResultsShown(msgspec.Struct, frozen=True, kw_only=True):
    """A page of the rows of a run."""

    job: JobLine
    run: RunBody
    is_latest: bool
    status: str
    group: str | UnsetType = UNSET
    results: list[ResultBody]
    next_cursor: str | UnsetType = UNSET


class TaskDetails(msgspec.Struct, frozen=True, kw_only=True):
    """A task with its attempts. Values of custom headers are masked."""

    job: JobLine
    run: RunBody
    task_id: str
    status: str
    url: str
    method: str
    params: dict[str, str]
    request: dict[str, Any]
    attempts: list[EventBody]
    external_id: str | UnsetType = UNSET
    metadata: dict[str, str] | UnsetType = UNSET
    waiting: WaitBody | UnsetType = UNSET
    error: ProblemBody | UnsetType = UNSET
    group: str | UnsetType = UNSET
    source_run_id: str | UnsetType = UNSET
    size: int | UnsetType = UNSET
    content_type: str | UnsetType = UNSET
    result_url: str | UnsetType = UNSET
    created_at: str
    updated_at: str


class Preview(msgspec.Struct, frozen=True):
    """The beginning of a body, of `size` bytes in all."""

    data: bytes
    size: int
    content_type: str

    @property
    def is_cut(self) -> bool:
        """Tell whether the body goes on."""
        return len(self.data) < self.size


class ScheduleLine(msgspec.Struct, frozen=True, kw_only=True):
    """A scheduled job in a list."""

    job: JobLine
    schedule: ScheduleBody
    schedule_state: str
    next_scheduled_run: str | UnsetType = UNSET


class SchedulesPage(msgspec.Struct, frozen=True):
    """Scheduled jobs."""

    schedules: list[ScheduleLine]
    next_cursor: str | UnsetType = UNSET


class SchedulePage(msgspec.Struct, frozen=True):
    """The schedule of a job, and the outcomes of its fires."""

    job: JobLine
    schedule: JobScheduleBody
    fires: list[FireRecordBody]
    next_cursor: str | UnsetType = UNSET


class DeliveriesShown(msgspec.Struct, frozen=True, kw_only=True):
    """The events of one caller or job; for a reader of all callers without a job, jobs that have
    a webhook, by their latest change."""

    jobs: list[JobLine]
    page: DeliveriesPage
    job_id: str | UnsetType = UNSET
    status: str | UnsetType = UNSET


class LetterLine(msgspec.Struct, frozen=True, kw_only=True):
    """A dead letter. It has no `kind` where it cannot be read, and no reason where it was received
    too often."""

    letter_id: str
    kind: str | UnsetType = UNSET
    job_id: str | UnsetType = UNSET
    run_id: str | UnsetType = UNSET
    task_id: str | UnsetType = UNSET
    export_id: str | UnsetType = UNSET
    reason: str | UnsetType = UNSET
    first_sent_at: str
    kept_until: str


class LettersPage(msgspec.Struct, frozen=True, kw_only=True):
    """Dead letters, oldest first; none where this server does not have them, which `has_queue`
    tells. `looked` were looked through, and the queue may have more if `is_cut`."""

    has_queue: bool
    letters: list[LetterLine]
    looked: int = 0
    is_cut: bool = False
    next_cursor: str | UnsetType = UNSET
