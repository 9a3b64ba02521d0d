"""The parts of the server's answers that the command line reads.

Unknown fields are ignored and unknown words kept as text, so that the client works with newer
servers.
"""

from __future__ import annotations

import msgspec

from conveyor.domain.model import IngestStatus, RunStatus

LIVE = frozenset({RunStatus.RUNNING.value, RunStatus.PENDING.value})


class StatsReply(msgspec.Struct, frozen=True):
    """Counters of a run."""

    total: int = 0
    completed: int = 0
    successful: int = 0
    failed: int = 0
    failure_reasons: dict[str, int] | None = None


class OutageReply(msgspec.Struct, frozen=True, kw_only=True):
    """Something shared that the work of a run waits for."""

    shared: str
    detail: str = ""
    since: str = ""
    never_answered: bool = False


class RunWaitReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The reason why a live run waits."""

    reason: str
    since: str = ""
    detail: str = ""
    until: str | None = None
    others: tuple[str, ...] = ()


class RunReply(msgspec.Struct, frozen=True, kw_only=True):
    """A run."""

    run_id: str
    job_id: str
    status: str
    stats: StatsReply = StatsReply()
    pause_state: str | None = None
    ingest_status: str | None = None
    failure_reason: str | None = None
    failure_detail: str | None = None
    outage: OutageReply | None = None
    waiting: RunWaitReply | None = None
    updated_at: str = ""

    @property
    def ingesting(self) -> bool:
        """Tell whether the server is still writing tasks of the run."""
        return self.live and self.ingest_status == IngestStatus.PENDING.value

    @property
    def live(self) -> bool:
        """Tell whether the run may still change."""
        return self.status in LIVE

    @property
    def paused(self) -> bool:
        """Tell whether the run waits to be resumed."""
        return self.live and self.pause_state == "paused"

    @property
    def idle(self) -> bool:
        """Tell whether the run of an open job waits for more tasks."""
        return self.status == RunStatus.PENDING.value

    @property
    def completed(self) -> bool:
        """Tell whether the run ended with every task done, successful or not."""
        return self.status == RunStatus.COMPLETED.value

    @property
    def cut_short(self) -> bool:
        """Tell whether the run was stopped, or failed, before every task was done."""
        ends = (RunStatus.STOPPED.value, RunStatus.FAILED.value)
        return self.status in ends and self.stats.completed < self.stats.total

    @property
    def succeeded(self) -> bool:
        """Tell whether the run ended and every task succeeded."""
        return self.completed and self.stats.successful == self.stats.total


class WebhookReply(msgspec.Struct, frozen=True):
    """The receiver of a job's events."""

    url: str
    signature: bool = False
    events: tuple[str, ...] = ()


class WebhookStatusReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """The state of a receiver."""

    last_outcome: str | None = None
    last_attempt_at: str | None = None
    failing_since: str | None = None
    next_attempt_at: str | None = None


class RateReply(msgspec.Struct, frozen=True):
    """Every so many units."""

    every: int
    unit: str


class DaysReply(msgspec.Struct, frozen=True):
    """Days of the week or of the month."""

    days: tuple[int | str, ...] = ()


class CadenceReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """The days of a calendar: one of the three."""

    daily: dict[str, object] | None = None
    weekly: DaysReply | None = None
    monthly: DaysReply | None = None


class CalendarReply(msgspec.Struct, frozen=True):
    """Some hours, on some days."""

    times_of_day: tuple[str, ...]
    cadence: CadenceReply


class ScheduleReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The times of a job's fires: one of `at`, `rate` and `calendar`."""

    at: str | None = None
    rate: RateReply | None = None
    calendar: CalendarReply | None = None
    timezone: str | None = None
    overlap: str | None = None


class JobReply(msgspec.Struct, frozen=True, kw_only=True):
    """A job; `created_at` is RFC 3339 text."""

    job_id: str
    status: str
    name: str | None = None
    external_id: str | None = None
    max_inflight: int = 0
    latest_run: RunReply | None = None
    created_at: str = ""
    webhook: WebhookReply | None = None
    webhook_status: WebhookStatusReply | None = None
    schedule: ScheduleReply | None = None
    schedule_state: str | None = None
    next_scheduled_run: str | None = None


class ReadinessReply(msgspec.Struct, frozen=True):
    """The state of a server; `role` tells of a development server that it is one."""

    status: str
    role: str = ""


class JobsReply(msgspec.Struct, frozen=True):
    """One page of jobs, newest first."""

    jobs: list[JobReply]
    next_cursor: str | None = None


class InvalidTaskReply(msgspec.Struct, frozen=True):
    """A refused task: its index in the submitted list, the reason, its line in the file, and what
    is wrong where the reason does not tell it."""

    index: int
    reason: str
    value: str | None = None
    line: int | None = None
    detail: str | None = None


class AddReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to an addition of tasks."""

    warnings: tuple[str, ...] = ()


class SubmitReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a submit: also the number of bad tasks left out, the first of them, and
    warnings. A scheduled job has no run yet."""

    job_id: str
    latest_run: RunReply | None = None
    accepted_tasks: int
    skipped_tasks: int = 0
    invalid_tasks: tuple[InvalidTaskReply, ...] = ()
    warnings: tuple[str, ...] = ()


class RerunReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a rerun: how many rows run again, how many were carried over."""

    job_id: str
    latest_run: RunReply
    retried_tasks: int
    inherited_tasks: int


class UploadReply(msgspec.Struct, frozen=True):
    """A signed address for a file, the headers to send with it, and the size it may have, if the
    server says so."""

    url: str
    method: str = "PUT"
    headers: dict[str, str] = {}
    max_bytes: int | None = None


class InputReply(msgspec.Struct, frozen=True):
    """A slot for a file of tasks."""

    file_input_id: str
    upload: UploadReply


class ExportReply(msgspec.Struct, frozen=True, kw_only=True):
    """An export. `download_url` is signed, new with each answer, and present once completed."""

    export_id: str
    status: str
    error: str | None = None
    download_url: str | None = None

    @property
    def live(self) -> bool:
        """Tell whether the export is still being made."""
        return self.status in ("pending", "running")


class ProblemReply(msgspec.Struct, frozen=True):
    """A problem document."""

    code: str = "internal"
    title: str = ""
    status: int = 0
    detail: str | None = None
    invalid_tasks: list[InvalidTaskReply] | None = None


class RefusalReply(ProblemReply, frozen=True, kw_only=True):
    """The problem document of a refused request, identified by its code."""

    code: str


FETCHED = frozenset({"successful", "expired"})
"""Statuses of a task that brought a body, even if it has expired since."""


class WaitReply(msgspec.Struct, frozen=True):
    """The reason for which a pending task is left alone, and the end of its wait."""

    reason: str
    until: str


class ResultRow(msgspec.Struct, frozen=True, kw_only=True):
    """A task of a run. `result_url` is signed and needs no key; None if there is no body."""

    task_id: str
    url: str
    status: str
    external_id: str | None = None
    metadata: dict[str, str] | None = None
    type: str | None = None
    size: int | None = None
    result_url: str | None = None
    error: ProblemReply | None = None
    source_run_id: str | None = None
    updated_at: str = ""
    waiting: WaitReply | None = None

    @property
    def succeeded(self) -> bool:
        """Tell whether the task brought a body, even if it has expired since."""
        return self.status in FETCHED


class FailureGroupReply(msgspec.Struct, frozen=True, kw_only=True):
    """Failed tasks of one kind. The group of what is of too many kinds has an id and a count
    alone."""

    group: str
    count: int
    reason: str | None = None
    code: str | None = None
    status: int | None = None
    detail: str | None = None
    first_at: str | None = None
    last_at: str | None = None
    task_ids: tuple[str, ...] = ()


class FailuresReply(msgspec.Struct, frozen=True):
    """The failed tasks of a run by kind, the most frequent first."""

    run_id: str
    failed: int
    groups: tuple[FailureGroupReply, ...]


class HostReply(msgspec.Struct, frozen=True, kw_only=True):
    """The work of a run at one host; `closed_until` is RFC 3339 text."""

    host: str
    pending: int
    claimed: int
    done: int
    failed: int
    limit: int | None = None
    rate: float | None = None
    ceiling: int | None = None
    closed_until: str | None = None
    interval: float | None = None
    limit_set_by: str | None = None
    rate_set_by: str | None = None
    pattern: str | None = None
    together: bool = False
    detail: str | None = None


class HostsReply(msgspec.Struct, frozen=True, kw_only=True):
    """The busiest hosts of a run, counted among `counted_tasks` of its tasks."""

    run_id: str
    tasks: int
    counted_tasks: int
    hosts: tuple[HostReply, ...]
    more_hosts: int = 0


class RawResultsPage(msgspec.Struct, frozen=True):
    """One page of results with undecoded rows."""

    results: list[msgspec.Raw]
    next_cursor: str | None = None


class SigningKeyReply(msgspec.Struct, frozen=True):
    """A signing key, without its secret."""

    kid: str
    created_at: str


class SigningKeysReply(msgspec.Struct, frozen=True):
    """The key that signs, and the one that a rotation has staged."""

    active: SigningKeyReply | None = None
    candidate: SigningKeyReply | None = None


class NewKeyReply(msgspec.Struct, frozen=True):
    """A new signing key, with its secret in base64."""

    kid: str
    secret: str
    created_at: str


class FinalizedKeyReply(msgspec.Struct, frozen=True):
    """The key that signs from now on."""

    active_kid: str
    created_at: str


class WebhookTestReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """The outcome of a test event."""

    delivered: bool
    event_id: str
    elapsed_ms: int
    status_code: int | None = None
    error: str | None = None


class DeliveryReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An event on its way to a receiver. `ladder` counts its replays from 1."""

    delivery_id: str
    job_id: str
    run_id: str
    event_type: str
    status: str
    attempt_count: int = 0
    last_outcome: str | None = None
    last_attempt_at: str | None = None
    next_attempt_at: str | None = None
    ladder: int = 1
    replayed_at: str | None = None
    created_at: str = ""


class AttemptReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request to a receiver."""

    number: int
    started_at: str
    milliseconds: int = 0
    outcome: str | None = None
    host: str | None = None
    next_attempt_at: str | None = None
    is_replay: bool = False


class LoggedDeliveryReply(DeliveryReply, frozen=True, kw_only=True, omit_defaults=True):
    """A delivery with its attempts, and its body as it is sent."""

    body: str
    attempts: tuple[AttemptReply, ...] = ()


class DeliveriesReply(msgspec.Struct, frozen=True):
    """One page of deliveries, newest first."""

    deliveries: list[DeliveryReply]
    next_cursor: str | None = None


class ReplayedReply(msgspec.Struct, frozen=True):
    """The number of deliveries that are sent again."""

    replayed: int


class DeliveryHeadersReply(msgspec.Struct, frozen=True):
    """Fresh headers of an event."""

    headers: dict[str, str]


class NextFireReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """A fire to come, and what the clock does then."""

    at: str
    local_time: str
    note: str | None = None


class JobScheduleReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The schedule of a job, and its next fires."""

    job_id: str
    schedule: ScheduleReply
    schedule_state: str
    next_scheduled_run: str | None = None
    waiting: str | None = None
    fires: tuple[NextFireReply, ...] = ()
    note: str | None = None


class FireReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The outcome of a fire, or of `count` in a row."""

    fire_id: str
    status: str
    local_time: str
    last_local_time: str = ""
    count: int = 1
    reason: str | None = None
    run_id: str | None = None


class FiresReply(msgspec.Struct, frozen=True):
    """One page of what became of fires, newest first."""

    fires: list[FireReply]
    next_cursor: str | None = None
