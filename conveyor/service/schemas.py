"""The documents that answers hold, which also give the OpenAPI document its schemas.

The docstring of a struct and the `Meta` of its fields are what callers read. A field that an answer
may lack is UNSET then, and left out of the JSON: no field is ever null.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Any, TypeVar

from msgspec import UNSET, Meta, Struct, UnsetType

from conveyor.domain import text_rules
from conveyor.domain.deliveries import MOST_ATTEMPTS_KEPT, TEST_EVENT, DeliveryStatus
from conveyor.domain.errors import ErrorCode, InvalidTask
from conveyor.domain.failure_groups import MOST_GROUPS, MOST_SAMPLES, OTHER_GROUP
from conveyor.domain.hosts import LimitSource
from conveyor.domain.model import (
    ACCOUNT_FAILURES,
    EventKind,
    Format,
    IngestStatus,
    JobStatus,
    RunStatus,
    TaskFailure,
    TaskStatus,
    WaitReason,
)
from conveyor.domain.remarks import MAX_LISTED
from conveyor.domain.result_shape import MOST_TYPES, OTHER_TYPE
from conveyor.domain.run_waits import RunWaitReason
from conveyor.domain.schedule import MOST_ZONE_NAME, UNITS, WEEKDAYS
from conveyor.domain.scheduling import FireStatus, Overlap, SkipReason
from conveyor.domain.submission import MAX_TASK_TOKEN
from conveyor.domain.text_rules import rfc3339
from conveyor.domain.webhooks import EventType
from conveyor.ports.exports import Export, ExportFormat, ExportStatus
from conveyor.ports.gateway import Shared

ULID_PATTERN = "^[0-7][0-9A-HJKMNP-TV-Z]{25}$"
TASK_ID_PATTERN = "^[0-9A-HJKMNP-TV-Z]{26}$"
EXTERNAL_ID_PATTERN = "^[A-Za-z0-9._-]{1,128}$"

Value = TypeVar("Value")


def present(value: Value | None) -> Value | UnsetType:
    """Turn a value that may be None into a field that may be left out."""
    return UNSET if value is None else value


def _text(description: str, **schema: Any) -> Meta:
    return Meta(description=description, extra_json_schema=schema)


def _count(description: str, *, least: int = 0) -> Meta:
    return Meta(description=description, ge=least)


def _ulid(description: str) -> Meta:
    return Meta(description=description, pattern=ULID_PATTERN)


def _words(words: Iterable[StrEnum | str], description: str) -> Meta:
    return _text(description, enum=[str(word) for word in words])


def _instant(description: str) -> Meta:
    return _text(description, format="date-time")


ExternalId = Annotated[
    str,
    Meta(
        description="An id of the caller's own, shown wherever this is shown. Need not be unique.",
        pattern=EXTERNAL_ID_PATTERN,
    ),
]
Metadata = Annotated[
    dict[str, Annotated[str, Meta(max_length=text_rules.MAX_METADATA_VALUE)]],
    Meta(
        description="Pairs of the caller's own. They are stored and shown, and sent nowhere.",
        max_length=text_rules.MAX_METADATA_KEYS,
        extra_json_schema={
            "propertyNames": {
                "pattern": rf"^[^\x00-\x1f\x7f-\x9f]{{1,{text_rules.MAX_METADATA_KEY}}}$"
            }
        },
    ),
]
NextCursor = Annotated[
    str, Meta(description="Send it as `cursor` to go on. Left out on the last page.")
]
FailureReasons = Annotated[
    dict[str, Annotated[int, Meta(ge=1)]],
    Meta(
        description="Failed tasks by reason. Left out while there are none.",
        extra_json_schema={"propertyNames": {"enum": [reason.value for reason in TaskFailure]}},
    ),
]


class SpendBody(Struct, frozen=True):
    """The credits and money spent, as an indication: no bill is made of it."""

    credits: Annotated[int, _count("Whole credits.")]
    cost: Annotated[float, Meta(ge=0)]


class SizeClassBody(Struct, frozen=True):
    """The bodies of one class of sizes, which ends where the next class begins."""

    least: Annotated[int, _count("Bytes of the smallest body of the class.")]
    count: Annotated[int, _count("Bodies of the class.")]


class ShapeBody(Struct, frozen=True):
    """The bodies of a run, inherited ones included, by size and by type."""

    sizes: Annotated[
        list[SizeClassBody], Meta(description="All classes, the class of empty bodies first.")
    ]
    types: Annotated[
        dict[str, Annotated[int, Meta(ge=1)]],
        Meta(
            description=(
                f"Bodies by media type: of the first {MOST_TYPES} types that came; all else is "
                f"`{OTHER_TYPE}`."
            )
        ),
    ]


class StatsBody(Struct, frozen=True, kw_only=True):
    """Counters of a run."""

    total: Annotated[int, _count("Tasks of the run.")]
    completed: Annotated[int, _count("Tasks that have ended: `successful` + `failed`.")]
    successful: Annotated[int, _count("Tasks that brought back a body.")]
    failed: Annotated[int, _count("Tasks that ended without one.")]
    failure_reasons: FailureReasons | UnsetType = UNSET
    spend: SpendBody
    inherited: (
        Annotated[
            int,
            _count("Ended tasks that a rerun took over from the run before. Left out for none."),
        ]
        | UnsetType
    ) = UNSET
    shape: ShapeBody | UnsetType = UNSET


class OutageBody(Struct, frozen=True, kw_only=True):
    """An outage: something that all tasks share is away, and the run waits for it."""

    shared: Annotated[str, _words(Shared, "What is away.")]
    detail: Annotated[str, Meta(description="What was seen of it, in a sentence.")]
    since: Annotated[str, _instant("When that began.")]
    never_answered: (
        Annotated[bool, Meta(description="There, and true, if it never answered this server.")]
        | UnsetType
    ) = UNSET


class RunWaitBody(Struct, frozen=True, kw_only=True):
    """The cause of a live run's wait: the first of the list that holds, as workers last said it."""

    reason: Annotated[
        str,
        _words(
            RunWaitReason,
            "`paused`: until it is resumed. `ingesting`: no task is written yet that could be "
            "worked. `no_worker`: none has said a word for three heartbeats. `queue_lost`: its "
            "queue is being made again. `permits_closed`: the ledger of permits was begun anew. "
            "`bodies_not_kept`: bodies cannot be stored. `gateway_throttled`: the gateway refuses "
            "for load, or something on the way to it is away. `host_closed`: every task left waits "
            "for its host, which asked for a pause or is at a limit. `retry_backoff`: every "
            "task left waits for its next attempt. `claims_held`: tasks are under claims of a "
            "worker that is silent. "
            "`max_inflight`: the cap of the job is in use. `slots`: every slot of every worker is.",
        ),
    ]
    since: Annotated[str, _instant("Since when, as far as it is known.")]
    until: Annotated[str, _instant("When it ends, where that is known.")] | UnsetType = UNSET
    detail: Annotated[str, Meta(description="The same in a sentence, with its numbers.")]
    others: (
        Annotated[list[str], Meta(description="The further reasons that hold, in order.")]
        | UnsetType
    ) = UNSET


class RunBody(Struct, frozen=True, kw_only=True):
    """One execution of a job."""

    run_id: Annotated[str, _ulid("The run.")]
    job_id: Annotated[str, _ulid("Its job.")]
    run_sequence: Annotated[int, _count("Counts from 1.", least=1)]
    status: Annotated[
        str,
        _words(
            RunStatus,
            "`pending` is an open job's run with nothing to do; it and `running` may still "
            "change, the others never do (but for deletion).",
        ),
    ]
    trigger: Annotated[str, _words(["manual", "scheduled"], "What set the run going.")]
    stats: StatsBody
    last_batch_received: (
        Annotated[bool, Meta(description="Told of first runs: whether no further task can come.")]
        | UnsetType
    ) = UNSET
    pause_state: (
        Annotated[str, _words(["paused"], "There while the run is paused.")] | UnsetType
    ) = UNSET
    ingest_status: (
        Annotated[
            str,
            _words(
                IngestStatus,
                "There where the tasks are written after the answer: `pending` until all are.",
            ),
        ]
        | UnsetType
    ) = UNSET
    created_at: Annotated[str, _instant("When the run was made.")]
    updated_at: Annotated[str, _instant("When it last changed.")]
    failure_reason: (
        Annotated[
            str, _words(sorted(ACCOUNT_FAILURES), "The cause in the account, where it is one.")
        ]
        | UnsetType
    ) = UNSET
    failure_detail: (
        Annotated[str, Meta(description="Why the whole run failed, in a sentence.", max_length=500)]
        | UnsetType
    ) = UNSET
    outage: OutageBody | UnsetType = UNSET
    waiting: RunWaitBody | UnsetType = UNSET


class CallbackBody(Struct, frozen=True):
    """A state machine of Step Functions that waits for the end of the first run."""

    task_token: Annotated[
        str,
        Meta(
            description="What it waits with. Whoever holds it can end that step.",
            min_length=1,
            max_length=MAX_TASK_TOKEN,
            pattern="^[!-~]+$",
        ),
    ]

    def __repr__(self) -> str:
        return "CallbackBody(task_token='…')"


class WebhookBody(Struct, frozen=True):
    """A receiver of a job's events."""

    url: Annotated[str, _text("Where events go, as it was sent.")]
    signature: Annotated[bool, _text("Whether events are signed.")]
    events: Annotated[
        list[Annotated[str, _words(EventType, "The end of a run.")]],
        _text("The events that are sent."),
    ]


class WebhookStatusBody(Struct, frozen=True):
    """The state of a receiver, as the newest deliveries to it tell it."""

    last_outcome: (
        Annotated[str, _text("`delivered`, or why the last attempt failed.")] | UnsetType
    ) = UNSET
    last_attempt_at: Annotated[str, _instant("When that attempt began.")] | UnsetType = UNSET
    failing_since: (
        Annotated[str, _instant("The first failure since the last success.")] | UnsetType
    ) = UNSET
    next_attempt_at: Annotated[str, _instant("When the next attempt is due.")] | UnsetType = UNSET


class RateBody(Struct, frozen=True):
    """Every so many units, counted in instants."""

    every: Annotated[int, _count("How many units.", least=1)]
    unit: Annotated[str, _words(UNITS, "The unit.")]


class WeekDaysBody(Struct, frozen=True):
    """Days of the week."""

    days: Annotated[list[Annotated[str, _words(WEEKDAYS, "A day.")]], Meta(min_length=1)]


class MonthDaysBody(Struct, frozen=True):
    """Days of the month; a month that lacks one passes it over."""

    days: Annotated[list[Annotated[int, Meta(ge=1, le=31)]], Meta(min_length=1)]


class CadenceBody(Struct, frozen=True, kw_only=True):
    """Exactly one of `daily`, `weekly` and `monthly`."""

    daily: Annotated[dict[str, str], Meta(description="Every day; always empty.")] | UnsetType = (
        UNSET
    )
    weekly: WeekDaysBody | UnsetType = UNSET
    monthly: MonthDaysBody | UnsetType = UNSET


class CalendarBody(Struct, frozen=True):
    """Some full hours, on some days."""

    times_of_day: Annotated[
        list[Annotated[str, Meta(pattern="^([01][0-9]|2[0-3]):00$")]],
        Meta(description="In order, none twice.", min_length=1),
    ]
    cadence: CadenceBody


class ScheduleBody(Struct, frozen=True, kw_only=True):
    """The times of a job's fires: exactly one of `at`, `rate` and `calendar`."""

    at: Annotated[str, _text("One fire, as it was sent.")] | UnsetType = UNSET
    rate: RateBody | UnsetType = UNSET
    calendar: CalendarBody | UnsetType = UNSET
    timezone: (
        Annotated[str, Meta(description="The zone of IANA.", max_length=MOST_ZONE_NAME)] | UnsetType
    ) = UNSET
    overlap: Annotated[
        str,
        _words(
            Overlap,
            "What becomes of a fire while a run of the job is live: it is skipped, or one of them "
            "waits for the end of that run.",
        ),
    ]


ScheduleStateWord = Annotated[
    str, _words(["active", "paused"], "Fires of a paused schedule are skipped.")
]
NextRun = (
    Annotated[
        str,
        _instant(
            "The next fire. It is known while the schedule is paused too; left out when none "
            "follows."
        ),
    ]
    | UnsetType
)


class PolitenessBody(Struct, frozen=True):
    """The manners of a job at each host; absent if it asked for none."""

    per_host: (
        Annotated[int, _count("Most calls of its caller in flight at a host.", least=1)] | UnsetType
    ) = UNSET
    per_host_rate: (
        Annotated[float, _text("Most calls of its caller that start at a host in a second.")]
        | UnsetType
    ) = UNSET
    robots: Annotated[bool, _text("Whether robots.txt is heeded.")] = False


class JobBody(Struct, frozen=True, kw_only=True):
    """A job with its latest run."""

    job_id: Annotated[str, _ulid("The job.")]
    type: Annotated[
        str, _words(["regular", "scheduled"], "A scheduled job makes a run at each fire.")
    ]
    status: Annotated[str, _words(JobStatus, "`deleted` while the job is being scrubbed.")]
    format: Annotated[str, _words(Format, "The form of result bodies, told by the parameters.")]
    zenrows_params: Annotated[dict[str, str], Meta(description="The job's parameters, as text.")]
    external_id: ExternalId | UnsetType = UNSET
    name: Annotated[str, Meta(description="The label given at submit.")] | UnsetType = UNSET
    metadata: Metadata | UnsetType = UNSET
    max_inflight: Annotated[int, _count("As submitted.")]
    priority: Annotated[int, _count("As submitted.")]
    max_attempts: Annotated[int, _count("As submitted.")]
    result_ttl_days: Annotated[int, _count("As submitted.")]
    callback: CallbackBody | UnsetType = UNSET
    webhook: WebhookBody | UnsetType = UNSET
    webhook_status: WebhookStatusBody | UnsetType = UNSET
    politeness: PolitenessBody | UnsetType = UNSET
    schedule: ScheduleBody | UnsetType = UNSET
    schedule_state: ScheduleStateWord | UnsetType = UNSET
    next_scheduled_run: NextRun = UNSET
    latest_run: RunBody | UnsetType = UNSET
    created_at: Annotated[str, _instant("When the job was submitted.")]
    updated_at: Annotated[str, _instant("When it last changed.")]


class JobsPage(Struct, frozen=True):
    """Jobs, newest first."""

    jobs: list[JobBody]
    next_cursor: NextCursor | UnsetType = UNSET


class RunsPage(Struct, frozen=True):
    """Runs, newest first."""

    runs: list[RunBody]
    next_cursor: NextCursor | UnsetType = UNSET


SkippedTasks = (
    Annotated[int, _count("How many bad tasks were left out, as asked.", least=1)] | UnsetType
)
LeftOut = (
    Annotated[
        tuple[InvalidTask, ...], _text(f"The first {MAX_LISTED} bad tasks that were left out.")
    ]
    | UnsetType
)
Warnings = Annotated[tuple[str, ...], _text("What was ignored: names of fields.")] | UnsetType


class SubmitBody(Struct, frozen=True, kw_only=True):
    """The result of a submit."""

    job_id: Annotated[str, _ulid("The new job.")]
    status: Annotated[str, _words(JobStatus, "Open or closed, as asked.")]
    latest_run: RunBody | UnsetType = UNSET
    accepted_tasks: Annotated[
        int, _count("How many tasks were written; of a scheduled job, how many each run will have.")
    ]
    webhook: WebhookBody | UnsetType = UNSET
    skipped_tasks: SkippedTasks = UNSET
    invalid_tasks: LeftOut = UNSET
    warnings: Warnings = UNSET


class AddTasksBody(Struct, frozen=True, kw_only=True):
    """The result of adding tasks."""

    accepted_tasks: Annotated[int, _count("How many tasks were written.")]
    job_status: Annotated[str, _words(JobStatus, "Closed after a last batch.")]
    latest_run: RunBody
    skipped_tasks: SkippedTasks = UNSET
    invalid_tasks: LeftOut = UNSET
    warnings: Warnings = UNSET


class RerunBody(Struct, frozen=True, kw_only=True):
    """The result of a rerun."""

    job_id: Annotated[str, _ulid("The job.")]
    status: Annotated[str, _words(JobStatus, "Closed: a rerun closes an open job.")]
    latest_run: RunBody
    rerun_of: (
        Annotated[
            str, _ulid("The run that was replayed; left out for the first run of a scheduled job.")
        ]
        | UnsetType
    ) = UNSET
    retried_tasks: Annotated[int, _count("Tasks that start afresh.")]
    inherited_tasks: Annotated[int, _count("Tasks taken over with their outcome.")]


class ProblemBody(Struct, frozen=True, kw_only=True):
    """A problem document (RFC 9457)."""

    type: Annotated[str, _text("Names the kind of problem.", format="uri")]
    title: Annotated[str, Meta(description="The kind of problem in words.")]
    status: Annotated[int, Meta(description="The status of the answer.")]
    detail: Annotated[str, Meta(description="What went wrong this time.")] | UnsetType = UNSET
    code: Annotated[
        str,
        Meta(
            description="Stable; decide by it. Problems of tasks may carry codes of the scraping "
            f"engine. Ours: {', '.join(code.value for code in ErrorCode)}."
        ),
    ]
    instance: Annotated[str, Meta(description="The request that met the problem.")] | UnsetType = (
        UNSET
    )


class WaitBody(Struct, frozen=True):
    """A wait: a pending task is left alone for now."""

    reason: Annotated[
        str,
        _words(
            WaitReason,
            "`backoff` is the pause after a failed attempt, `retry_after` the one that its answer "
            "asked for, `host_retry_after` the one that another answer of its host asked for, "
            "`load_refusal` the one of a gateway under load, `host_limit` the one until its place "
            "in the line of its host, or after the host refused it and did not say for how long. "
            "`outage`: something that its work needs is away.",
        ),
    ]
    until: Annotated[str, _instant("When it may be worked again.")]


class ResultBody(Struct, frozen=True, kw_only=True, gc=False):
    """One task of a run, and what became of it."""

    # The body of a POST is never listed.
    task_id: Annotated[str, Meta(description="The task.", pattern=TASK_ID_PATTERN)]
    external_id: ExternalId | UnsetType = UNSET
    run_id: Annotated[str, _ulid("The run that this row stands in.")]
    url: Annotated[str, Meta(description="As submitted.")]
    metadata: Metadata | UnsetType = UNSET
    method: Annotated[str, _words(["POST"], "Left out for GET.")] | UnsetType = UNSET
    status: Annotated[
        str,
        _words(
            [*TaskStatus, "expired"],
            "`expired` is a successful task whose body is past its retention.",
        ),
    ]
    waiting: WaitBody | UnsetType = UNSET
    type: Annotated[str, _words(Format, "The form of the body.")] | UnsetType = UNSET
    size: Annotated[int, _count("Bytes of the body.")] | UnsetType = UNSET
    result_url: (
        Annotated[
            str,
            _text("A signed link to the body, good for a while and without a key.", format="uri"),
        ]
        | UnsetType
    ) = UNSET
    error: ProblemBody | UnsetType = UNSET
    failure_group: (
        Annotated[
            str,
            _text(
                "Told of failed tasks: their kind of failure, which is their group in `failures`; "
                f"a kind that the run has no group for counts in `{OTHER_GROUP}`."
            ),
        ]
        | UnsetType
    ) = UNSET
    source_run_id: (
        Annotated[str, _ulid("The run that owns the body of an inherited row.")] | UnsetType
    ) = UNSET
    created_at: Annotated[str, _instant("When the row was made.")]
    updated_at: Annotated[str, _instant("When it last changed: for an ended task, when it ended.")]


class ResultsPage(Struct, frozen=True):
    """Results in submission order. A filtered page may be short, or empty, and still go on."""

    results: list[ResultBody]
    next_cursor: NextCursor | UnsetType = UNSET


class FailureGroupBody(Struct, frozen=True, kw_only=True):
    """Failed tasks of one kind: of one reason, code, status, and detail but for what varies, such
    as numbers and URLs. The last, `other`, holds what is of too many kinds; it has an id and a
    count alone."""

    group: Annotated[str, _text("The id, for `group` of results and rerun.")]
    count: Annotated[int, _count("Tasks of the group.", least=1)]
    reason: Annotated[str, _words(TaskFailure, "Why they failed.")] | UnsetType = UNSET
    code: Annotated[str, _text("The code of their problems.")] | UnsetType = UNSET
    status: Annotated[int, _count("The status of their problems.")] | UnsetType = UNSET
    detail: Annotated[str, _text("The problem of one of them, in full.")] | UnsetType = UNSET
    first_at: Annotated[str, _instant("When the first one failed.")] | UnsetType = UNSET
    last_at: Annotated[str, _instant("When the last one failed.")] | UnsetType = UNSET
    task_ids: (
        Annotated[list[str], Meta(description=f"Some of them, {MOST_SAMPLES} at most.")] | UnsetType
    ) = UNSET


class FailuresBody(Struct, frozen=True):
    """The failed tasks of a run by kind. The counts add up to `failed`."""

    run_id: Annotated[str, _ulid("The run.")]
    failed: Annotated[int, _count("Failed tasks of the run.")]
    groups: Annotated[
        list[FailureGroupBody],
        Meta(description=f"The largest first: at most {MOST_GROUPS}, and `{OTHER_GROUP}`."),
    ]


_SET_BY = (
    "`server`: a setting of the server. `pattern`: a pattern of its file of hosts. `job`: the "
    "politeness of the job."
)


class HostBody(Struct, frozen=True, kw_only=True):
    """A run at one host: its own tasks, and the limits on all calls of its caller there.
    What the host has said holds over all runs."""

    host: Annotated[str, _text("Name and port.")]
    pending: Annotated[int, _count("Tasks that wait.")]
    claimed: Annotated[
        int, _count("Tasks in work: under way, being settled, or waiting for their start.")
    ]
    done: Annotated[int, _count("Tasks that ended successful.")]
    failed: Annotated[int, _count("Tasks that ended failed.")]
    limit: (
        Annotated[int, _count("Most calls in flight that the strictest limit allows.", least=1)]
        | UnsetType
    ) = UNSET
    rate: (
        Annotated[float, _text("Most calls a second that the strictest limit allows.")] | UnsetType
    ) = UNSET
    ceiling: (
        Annotated[int, _count("Most calls in flight since the host refused some.", least=1)]
        | UnsetType
    ) = UNSET
    closed_until: (
        Annotated[str, _instant("The end of the pause that the host asked for.")] | UnsetType
    ) = UNSET
    interval: (
        Annotated[float, _text("Seconds between calls that its robots.txt asks for.")] | UnsetType
    ) = UNSET
    limit_set_by: Annotated[str, _words(LimitSource, _SET_BY)] | UnsetType = UNSET
    rate_set_by: Annotated[str, _words(LimitSource, _SET_BY)] | UnsetType = UNSET
    pattern: (
        Annotated[str, _text("The pattern of the server's file by which these hold.")] | UnsetType
    ) = UNSET
    together: (
        Annotated[
            bool,
            Meta(description="There, and true, if they bound all hosts of the pattern together."),
        ]
        | UnsetType
    ) = UNSET
    detail: (
        Annotated[str, Meta(description="What bounds the calls there, and who set that.")]
        | UnsetType
    ) = UNSET


class HostsBody(Struct, frozen=True, kw_only=True):
    """The hosts of a run, the busiest first. The tasks that were taken over from an earlier run are
    of none of them."""

    run_id: Annotated[str, _ulid("The run.")]
    tasks: Annotated[int, _count("Tasks of the run.")]
    counted_tasks: Annotated[
        int, _count("Tasks that were counted by host: all, or 10,000, with `held` 1,000, of more.")
    ]
    hosts: Annotated[list[HostBody], Meta(description="At most 100.")]
    more_hosts: Annotated[int, _count("Further hosts of these tasks.")]


class EventBody(Struct, frozen=True, kw_only=True):
    """One line of a task's history."""

    started_at: Annotated[str, _instant("When it began.")]
    ended_at: Annotated[str, _instant("When it ended.")]
    attempt: Annotated[int, _count("Counts from 1.", least=1)]
    kind: Annotated[
        str,
        _words(EventKind, "An interruption is a worker that went away; it uses up no attempt."),
    ]
    sent: (
        Annotated[int, _count("Requests that the attempt sent, redirects included, where not one.")]
        | UnsetType
    ) = UNSET
    error: ProblemBody | UnsetType = UNSET
    spend: SpendBody


class HistoryBody(Struct, frozen=True):
    """The history of a task, oldest line first."""

    events: list[EventBody]
    waiting: WaitBody | UnsetType = UNSET


class UploadBody(Struct, frozen=True):
    """The request that sends the file. Until the link ends it may be sent again."""

    method: Annotated[str, _words(["PUT"], "How the file is sent.")]
    url: Annotated[str, _text("A signed link: no key is needed.", format="uri")]
    headers: Annotated[
        dict[str, str],
        Meta(description="Headers to send with these very values: the link is bound to them."),
    ]
    expires_at: Annotated[str, _instant("When the link ends.")]
    # Not asked for by the contract.
    max_bytes: Annotated[int, _count("Most bytes that a file may have.")]


class JobInputBody(Struct, frozen=True):
    """A slot for one file."""

    file_input_id: Annotated[str, _ulid("What a submit names the file by.")]
    upload: UploadBody
    expires_at: Annotated[str, _instant("When the slot and its file are removed.")]
    warnings: Warnings = UNSET


ExportId = Annotated[str, _ulid("What the export is polled by.")]
ExportState = Annotated[str, _words(ExportStatus, "How far it is.")]
ExportStart = Annotated[str, _instant("When it was asked for.")]
ExportEnd = Annotated[str, _instant("When it is removed; from then on it is not found.")]


class StartExportBody(Struct, frozen=True, kw_only=True):
    """An export that was just asked for."""

    export_id: ExportId
    status: ExportState
    created_at: ExportStart
    expires_at: ExportEnd


class ExportBody(Struct, frozen=True, kw_only=True):
    """An export of a run's results."""

    export_id: ExportId
    status: ExportState
    # Not asked for by the contract.
    format: Annotated[str, _words(ExportFormat, "Its form.")]
    error: Annotated[str, Meta(description="Why it failed; stable.")] | UnsetType = UNSET
    download_url: (
        Annotated[
            str,
            _text(
                "Where a completed export is fetched, with no key. Fresh on each poll.",
                format="uri",
            ),
        ]
        | UnsetType
    ) = UNSET
    created_at: ExportStart
    expires_at: ExportEnd


def start_export_body(export: Export) -> StartExportBody:
    """Build the answer to the start of an export."""
    return StartExportBody(
        export_id=export.export_id,
        status=export.status.value,
        created_at=rfc3339(export.created_at),
        expires_at=rfc3339(export.expires_at),
    )


def export_body(export: Export, *, download_url: str | None) -> ExportBody:
    """Build the answer to a poll of an export."""
    return ExportBody(
        export_id=export.export_id,
        status=export.status.value,
        format=export.format.value,
        error=present(export.error),
        download_url=present(download_url),
        created_at=rfc3339(export.created_at),
        expires_at=rfc3339(export.expires_at),
    )


Kid = Annotated[str, _ulid("The id of the key; deliveries name the key that signed them by it.")]
MadeAt = Annotated[str, _instant("When the key was made.")]


class SigningKeyBody(Struct, frozen=True):
    """A signing key, without its secret."""

    kid: Kid
    created_at: MadeAt


class SigningKeysBody(Struct, frozen=True):
    """Your signing keys: the one that signs, and the one that a rotation has staged."""

    active: SigningKeyBody | UnsetType = UNSET
    candidate: SigningKeyBody | UnsetType = UNSET


class NewSigningKeyBody(Struct, frozen=True):
    """A new signing key. No other answer holds its secret."""

    kid: Kid
    secret: Annotated[str, _text("32 bytes in base64. Keep it: it is never shown again.")]
    created_at: MadeAt


class FinalizedKeyBody(Struct, frozen=True):
    """The key that signs from now on."""

    active_kid: Kid
    created_at: MadeAt


class WebhookTestBody(Struct, frozen=True):
    """The outcome of a test event. The answer is 200 whatever the receiver did."""

    delivered: Annotated[bool, _text("Whether the receiver answered with a 2xx status.")]
    event_id: Annotated[str, _ulid("The id of the event, another one each time.")]
    elapsed_ms: Annotated[int, _count("Milliseconds that the request took.")]
    status_code: Annotated[int, _count("The status of the receiver's answer, if one came.")] | (
        UnsetType
    ) = UNSET
    error: (
        Annotated[
            str,
            _text(
                "Why it was not delivered: `http_4xx:404`, `http_5xx:503`, `http_3xx:302`, "
                "`timeout` or `transport_error:…`."
            ),
        ]
        | UnsetType
    ) = UNSET


class DeliveryBody(Struct, frozen=True, kw_only=True):
    """An event on its way to a receiver."""

    delivery_id: Annotated[str, _ulid("The id of the event.")]
    job_id: Annotated[str, _text("The job, or `test`.")]
    run_id: Annotated[str, _text("The run, or `test`.")]
    event_type: Annotated[str, _words([*EventType, TEST_EVENT], "The kind of the event.")]
    status: Annotated[
        str,
        _words(
            DeliveryStatus, "`dropped`: no longer owed, as the webhook, the run or the job is gone."
        ),
    ]
    attempt_count: Annotated[int, _count("The attempts so far, those of replays included.")]
    last_outcome: (
        Annotated[
            str,
            _text(
                "What came of the last attempt: `delivered`, `http_4xx:404`, `http_5xx:503`, "
                "`http_3xx:302`, `timeout` or `transport_error:…`. Left out while it is under way."
            ),
        ]
        | UnsetType
    ) = UNSET
    last_attempt_at: Annotated[str, _instant("When that began.")] | UnsetType = UNSET
    next_attempt_at: Annotated[str, _instant("When the next one is due.")] | UnsetType = UNSET
    ladder: Annotated[int, _count("1, and one more for each replay.", least=1)]
    replayed_at: Annotated[str, _instant("When it was last replayed.")] | UnsetType = UNSET
    created_at: Annotated[str, _instant("When the event was made.")]
    updated_at: Annotated[str, _instant("When the delivery last changed.")]


class DeliveryAttemptBody(Struct, frozen=True, kw_only=True):
    """One request to a receiver."""

    number: Annotated[int, _count("Counts from 1, through all replays.", least=1)]
    started_at: Annotated[str, _instant("When it began.")]
    milliseconds: Annotated[int, _count("How long it took.")]
    outcome: (
        Annotated[str, _text("`delivered` or the failure; left out if it did not end.")] | UnsetType
    ) = UNSET
    host: Annotated[str, _text("The host that was asked.")] | UnsetType = UNSET
    status: Annotated[int, _count("The status of the answer, if one came.")] | UnsetType = UNSET
    content_type: Annotated[str, _text("The media type of its body.")] | UnsetType = UNSET
    length: Annotated[int, _count("The length of its body, as announced.")] | UnsetType = UNSET
    next_attempt_at: Annotated[str, _instant("When the next one was to be made.")] | UnsetType = (
        UNSET
    )
    is_replay: Annotated[bool, _text("Whether it belongs to a replay.")]
    headers: Annotated[
        dict[str, str], _text("What was sent, with signatures cut to their first letters.")
    ]


class LoggedDeliveryBody(DeliveryBody, frozen=True, kw_only=True):
    """A delivery with its bytes and attempts."""

    body: Annotated[str, _text("The event, byte for byte as each attempt sends it.")]
    attempts: Annotated[
        list[DeliveryAttemptBody],
        _text(f"Oldest first; at most the last {MOST_ATTEMPTS_KEPT}."),
    ]


class DeliveriesPage(Struct, frozen=True):
    """Deliveries, newest first."""

    deliveries: list[DeliveryBody]
    next_cursor: NextCursor | UnsetType = UNSET


class ReplayedBody(Struct, frozen=True):
    """The result of replaying a window."""

    replayed: Annotated[int, _count("How many deliveries were queued.")]


class DeliveryHeadersBody(Struct, frozen=True):
    """Headers for an event as if it were sent now."""

    headers: Annotated[dict[str, str], _text("Signed at this moment, if its webhook asks for it.")]


class FireBody(Struct, frozen=True):
    """One fire of a schedule."""

    at: Annotated[str, _instant("The instant, in UTC.")]
    local_time: Annotated[
        str, _instant("The same on the clock of the schedule's zone; of a rate, in UTC.")
    ]
    note: (
        Annotated[str, _text("What the clock does then, if the time is missing or comes twice.")]
        | UnsetType
    ) = UNSET


class SchedulePreviewBody(Struct, frozen=True):
    """The next fires of a schedule, at most ten."""

    zones_version: Annotated[str, _text("The version of the zone rules.")]
    fires: Annotated[list[FireBody], _text("In order, each later than the one before.")]


class JobScheduleBody(Struct, frozen=True, kw_only=True):
    """The schedule of a job, and its next fires, at most ten."""

    job_id: Annotated[str, _ulid("The job.")]
    schedule: ScheduleBody
    schedule_state: ScheduleStateWord
    next_scheduled_run: NextRun = UNSET
    waiting: (
        Annotated[str, _text("The local time of the fire that waits for the end of the live run.")]
        | UnsetType
    ) = UNSET
    zones_version: Annotated[
        str, _text("The version of the zone rules that the next fire is computed by.")
    ]
    fires: Annotated[list[FireBody], _text("In order, each later than the one before.")]
    note: (
        Annotated[str, _text("Why there are none, if the zone rules do not have the zone.")]
        | UnsetType
    ) = UNSET


class FireRecordBody(Struct, frozen=True, kw_only=True):
    """The outcome of a fire, or of several in a row."""

    fire_id: Annotated[str, _ulid("The row.")]
    status: Annotated[
        str,
        _words(
            FireStatus,
            "`started` made a run, `skipped` made none, `missed` passed while no worker looked.",
        ),
    ]
    reason: Annotated[str, _words(SkipReason, "Why it made no run.")] | UnsetType = UNSET
    count: Annotated[int, _count("How many fires.", least=1)]
    at: Annotated[str, _instant("The instant of the first of them.")]
    local_time: Annotated[
        str, _text("Its time on the clock of the schedule's zone, as scheduled; of a rate, in UTC.")
    ]
    last_at: Annotated[str, _instant("The instant of the last of them.")]
    last_local_time: Annotated[str, _text("Its time on that clock.")]
    run_id: Annotated[str, _ulid("The run that it made.")] | UnsetType = UNSET
    updated_at: Annotated[str, _instant("When the row last changed.")]


class FiresPage(Struct, frozen=True):
    """The outcomes of the fires of a job, newest first. Rows are kept for some days."""

    fires: list[FireRecordBody]
    next_cursor: NextCursor | UnsetType = UNSET
