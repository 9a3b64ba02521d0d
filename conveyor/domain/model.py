"""The records that rooms and adapters exchange.

Times are integers: milliseconds since the epoch, UTC. Durations are seconds unless a name says
otherwise. Records are immutable; a change makes a new one.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from conveyor.domain.hosts import Politeness
from conveyor.domain.result_shape import ResultShape
from conveyor.domain.scheduling import Scheduling
from conveyor.domain.webhooks import Webhook


class JobStatus(StrEnum):
    """open → closed → deleted."""

    OPEN = "open"
    CLOSED = "closed"
    DELETED = "deleted"


class RunStatus(StrEnum):
    """running ⇄ pending → completed | stopped | failed | deleted."""

    RUNNING = "running"
    PENDING = "pending"
    COMPLETED = "completed"
    STOPPED = "stopped"
    FAILED = "failed"
    DELETED = "deleted"


class TaskStatus(StrEnum):
    """pending → processing → successful | failed; back to pending for another attempt."""

    PENDING = "pending"
    PROCESSING = "processing"
    SUCCESSFUL = "successful"
    FAILED = "failed"


class Format(StrEnum):
    """The form of a result body, implied by the scraper params."""

    HTML = "html"
    JSON = "json"
    MARKDOWN = "markdown"
    PLAINTEXT = "plaintext"
    PDF = "pdf"


class TaskFailure(StrEnum):
    """The coarse reason of a task's failure, summed up in a run's `stats.failure_reasons`."""

    AUTH_FAILED = "auth_failed"
    BLOCKED = "blocked"
    BAD_TARGET = "bad_target"
    RATE_LIMITED = "rate_limited"
    TIMEOUT = "timeout"
    GATEWAY_ERROR = "gateway_error"
    OTHER = "other"


class WaitReason(StrEnum):
    """The reason why a task that could be worked is left alone until its `not_before`."""

    BACKOFF = "backoff"
    RETRY_AFTER = "retry_after"
    HOST_RETRY_AFTER = "host_retry_after"
    HOST_LIMIT = "host_limit"
    LOAD_REFUSAL = "load_refusal"
    OUTAGE = "outage"


class RunFailure(StrEnum):
    """The cause that fails a whole run: an account-level one, or a list of tasks that cannot be
    written."""

    INSUFFICIENT_CREDITS = "insufficient_credits"
    SUBSCRIPTION_INACTIVE = "subscription_inactive"
    API_KEY_CAP_REACHED = "api_key_cap_reached"
    INGEST_FAILED = "ingest_failed"


ACCOUNT_FAILURES = frozenset(RunFailure) - {RunFailure.INGEST_FAILED}
"""The causes that answers and events name. The published client knows no others."""


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """An RFC 9457 document stored with a task: the error of one attempt."""

    code: str
    title: str
    status: int
    type: str = "about:blank"
    detail: str | None = None
    instance: str | None = None


class Spend(msgspec.Struct, frozen=True, omit_defaults=True):
    """Indicative cost: whole credits, and money in the gateway's currency."""

    credits: int = 0
    cost: float = 0.0

    def __add__(self, other: Spend) -> Spend:
        return Spend(self.credits + other.credits, self.cost + other.cost)


class TaskBody(msgspec.Struct, frozen=True):
    """A POST body: the text to send, and its Content-Type."""

    content: str
    content_type: str


class TaskSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """A caller's request for one URL; never changes after submit, and a rerun copies it."""

    url: str
    external_id: str | None = None
    metadata: dict[str, str] | None = None
    method: str = "GET"
    body: TaskBody | None = None
    params: dict[str, str] | None = None


class Callback(msgspec.Struct, frozen=True):
    """The state machine waiting for the end of a job's first run, named by its task token.

    Whoever has the token can end that task: it is a secret, and `repr` does not show it.
    """

    task_token: str

    def __repr__(self) -> str:
        return "Callback(task_token='…')"


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A reusable template and its configuration.

    `caller` is the keyed hash of the API key, `sealed_key` the encrypted key itself. A scheduled
    job has a `scheduling`, and no run before its first fire. `webhook_number` grows whenever a
    webhook is set where there is none: a run that ended before waits for another one. `version`
    counts writes, for optimistic locking.
    """

    job_id: str
    caller: str
    status: JobStatus
    created_at: int
    updated_at: int
    name: str | None = None
    external_id: str | None = None
    metadata: dict[str, str] | None = None
    params: dict[str, str] = {}
    format: Format = Format.HTML
    max_inflight: int = 100
    priority: int = 5
    max_attempts: int = 3
    result_ttl_days: int = 14
    task_shard_count: int = 1
    shard_scheme: str = "stripe"
    sealed_key: bytes = b""
    latest_run_id: str | None = None
    run_count: int = 0
    callback: Callback | None = None
    webhook: Webhook | None = None
    scheduling: Scheduling | None = None
    webhook_number: int = 0
    politeness: Politeness | None = None
    version: int = 1

    def number_of(self, webhook: Webhook | None) -> int:
        """Return the number that a webhook has once it replaces the present one."""
        is_another = self.webhook is None and webhook is not None
        return self.webhook_number + is_another

    @property
    def goes_with_its_runs(self) -> bool:
        """True if retention removes the job with the last of its runs: no fire makes another."""
        return self.scheduling is None or self.scheduling.is_over


class GroupFilter(msgspec.Struct, frozen=True):
    """A choice of failed tasks: those of the `named` groups. With `outside`, the ids of the groups
    that their run keeps, also the tasks of none of them, which count together as `other`; rows that
    failed before there were groups are among these."""

    named: frozenset[str]
    outside: frozenset[str] | None = None

    def takes(self, group_id: str | None) -> bool:
        """Tell whether a failed task with this group is chosen; None is the group of a row that
        failed before there were groups."""
        return group_id in self.named or (self.outside is not None and group_id not in self.outside)


class IngestStatus(StrEnum):
    """The progress of writing a large run's rows: pending → done."""

    PENDING = "pending"
    DONE = "done"


class Ingest(msgspec.Struct, frozen=True, kw_only=True):
    """The way the rows of a large run are written, and the progress.

    The run will have indexes below `end`; rows below `next_index` have been written. A submit
    stages its rows in chunks, named in `chunks` by their first indexes; with `template` they are
    those of the list `list_id` of the job's template, and its rows get ids of the run. A rerun has
    no chunks and copies the rows of `Run.rerun_of`: rows of `statuses` afresh (None: all), of those
    that `groups` takes where it is set, and other terminal ones as they are.
    """

    status: IngestStatus
    end: int
    next_index: int = 0
    chunks: tuple[int, ...] = ()
    template: bool = False
    list_id: str = "0"
    statuses: frozenset[TaskStatus] | None = None
    groups: GroupFilter | None = None


class RunStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of a run: a cache of its task rows. completed = successful + failed ≤ total.

    `inherited` counts the ended rows that a rerun took over, or will.
    """

    total: int = 0
    successful: int = 0
    failed: int = 0
    failure_reasons: dict[str, int] = {}
    spend: Spend = Spend()
    inherited: int = 0
    shape: ResultShape = ResultShape()

    @property
    def completed(self) -> int:
        """Return the number of ended tasks."""
        return self.successful + self.failed


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One drain of a job.

    `next_index` is the index of the next added task; `rerun_of` names the run replayed. `ingest` is
    set on runs whose rows are written after the request that makes them. `traceparent` names the
    trace of that request, or of the fire, if it was traced.
    """

    run_id: str
    job_id: str
    run_sequence: int
    status: RunStatus
    created_at: int
    updated_at: int
    trigger: str = "manual"
    paused: bool = False
    last_batch_received: bool = False
    next_index: int = 0
    stats: RunStats = RunStats()
    failure_reason: RunFailure | None = None
    failure_detail: str | None = None
    rerun_of: str | None = None
    ingest: Ingest | None = None
    traceparent: str | None = None
    version: int = 1

    @property
    def ingesting(self) -> bool:
        """Return whether further rows are still being written."""
        return self.ingest is not None and self.ingest.status is IngestStatus.PENDING


class JobView(msgspec.Struct, frozen=True):
    """A job and its latest run, read at one instant. A deleted run counts in a deleted job
    alone."""

    job: Job
    latest_run: Run | None


class NewTask(msgspec.Struct, frozen=True):
    """A task to be written: its index, its id, its spec."""

    index: int
    task_id: str
    spec: TaskSpec


class StoredBody(msgspec.Struct, frozen=True):
    """The place of a stored body and how to serve it; `content_type` keeps its charset."""

    blob_key: str
    size: int
    content_type: str
    format: Format


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One URL in one run.

    `attempts` counts the attempts that used up a try, `interruptions` the lapsed claims.
    `claim_number` grows with each claim and fences off holders of earlier ones; `claimed_until`
    bounds the current claim. `not_before` delays the next attempt, and `waiting` says why it does.
    `waiting_since` is when the waits without an attempt between them began, 0 outside of any.
    `source_run_id` is set on inherited rows, `failure_group` on failed ones; rows that failed
    before there were groups have none.
    """

    run_id: str
    task_id: str
    index: int
    spec: TaskSpec
    status: TaskStatus
    created_at: int
    updated_at: int
    attempts: int = 0
    interruptions: int = 0
    claim_number: int = 0
    claimed_until: int = 0
    not_before: int = 0
    waiting: WaitReason | None = None
    waiting_since: int = 0
    result: StoredBody | None = None
    error: Problem | None = None
    failure: TaskFailure | None = None
    failure_group: str | None = None
    source_run_id: str | None = None

    def wait_at(self, now: int) -> WaitReason | None:
        """Return why the task waits at `now`; None if it is due, in work or at its end."""
        is_waiting = self.status is TaskStatus.PENDING and self.not_before > now
        return self.waiting if is_waiting else None


class EventKind(StrEnum):
    """An attempt reached the gateway; an interruption is a claim that lapsed or was given up."""

    ATTEMPT = "attempt"
    INTERRUPTION = "interruption"


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a task's history. `attempt` is the attempt made or interrupted, from 1; `sent`
    counts the requests that the attempt sent."""

    kind: EventKind
    attempt: int
    started_at: int
    ended_at: int
    error: Problem | None = None
    spend: Spend = Spend()
    sent: int = 1


class DispatchableRun(msgspec.Struct, frozen=True, kw_only=True):
    """The dispatcher's view of a run that may have work; holds no secret and no URL.

    `created_at` is in milliseconds. `traceparent` is that of its run. `caller` is that of its job,
    empty where nobody knows; so is `politeness`. `hosts` are those of its hosts that have a queue
    of their own, in the order of their numbers.
    """

    run_id: str
    job_id: str
    priority: int
    max_inflight: int
    created_at: int
    traceparent: str | None = None
    caller: str = ""
    politeness: Politeness | None = None
    hosts: tuple[str, ...] = ()
