"""Whole documents: a job to create, tasks to add."""

from __future__ import annotations

from typing import Any

import pytest
from zenrows.batch.models import InvalidTask as ClientInvalidTask
from zenrows.batch.models import SubmitJobRequest

from conveyor.domain import strict_json
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.errors import InvalidTaskReason as Reason
from conveyor.domain.hosts import Politeness
from conveyor.domain.model import Callback, Format, TaskSpec
from conveyor.domain.remarks import Remarks
from conveyor.domain.schedule import Rate, Schedule
from conveyor.domain.scheduling import Overlap
from conveyor.domain.submission import AddRequest, JobRequest, Limits, parse_add, parse_job
from conveyor.domain.webhooks import EventType, Webhook

TASK = {"url": "https://example.com/"}
LIMITS = Limits()


def job(**fields: object) -> JobRequest:
    return parse_job({"tasks": [TASK], **fields}, LIMITS)


def refusal(document: object, limits: Limits = LIMITS) -> ConveyorError:
    with pytest.raises(ConveyorError) as caught:
        parse_job(document, limits)
    return caught.value


def test_defaults() -> None:
    assert job() == JobRequest(
        open=False,
        name=None,
        external_id=None,
        metadata=None,
        params={},
        format=Format.HTML,
        specs=[TaskSpec("https://example.com/")],
        max_inflight=100,
        priority=5,
        max_attempts=3,
        result_ttl_days=14,
        force_async=False,
        file_input_id=None,
        callback=None,
        webhook=None,
    )


def test_every_field() -> None:
    request = parse_job(
        {
            "type": "regular",
            "status": "closed",
            "name": "n" * 100,
            "external_id": "nightly",
            "metadata": {"team": "a"},
            "zenrows_params": {"autoparse": True},
            "max_inflight": 10_000,
            "priority": 0,
            "max_attempts": 10,
            "result_ttl_days": 365,
            "async": True,
            "file_input_id": "01ARZ3NDEKTSV4RRFFQ69G5FAV",
            "webhook": {"url": "https://a/"},
            "callback": {"task_token": "t"},
            "politeness": {"per_host": 3, "per_host_rate": 1, "robots": True},
        },
        LIMITS,
    )
    assert request == JobRequest(
        open=False,
        name="n" * 100,
        external_id="nightly",
        metadata={"team": "a"},
        params={"autoparse": "true"},
        format=Format.JSON,
        specs=[],
        max_inflight=10_000,
        priority=0,
        max_attempts=10,
        result_ttl_days=365,
        force_async=True,
        file_input_id="01ARZ3NDEKTSV4RRFFQ69G5FAV",
        callback=Callback("t"),
        webhook=Webhook("https://a/"),
        politeness=Politeness(3, 1.0, robots=True),
    )


@pytest.mark.parametrize("given", [{}, {"robots": False}, {"per_host": None}, None], ids=repr)
def test_a_job_that_asks_for_no_manners_has_none(given: object) -> None:
    assert job(politeness=given).politeness is None


@pytest.mark.parametrize("token", [None, "", 5, ["t"], "a b", "t\n", "café", "x" * 2_049], ids=repr)
def test_what_is_no_task_token(token: object) -> None:
    error = refusal({"tasks": [TASK], "callback": {"task_token": token}})
    assert error.code is ErrorCode.INVALID_ARGUMENT
    assert error.detail.startswith("callback.task_token: must be 1 to 2048")


def test_a_callback_without_a_task_token() -> None:
    assert refusal({"tasks": [TASK], "callback": {}}).detail.startswith("callback.task_token: ")


def test_a_task_token_is_shown_nowhere() -> None:
    token = "s3cret" * 300
    request = job(callback={"task_token": token})
    assert request.callback == Callback(token)
    assert "s3cret" not in repr(request)
    error = refusal({"tasks": [TASK], "callback": {"task_token": token + token}})
    assert "s3cret" not in error.detail


@pytest.mark.parametrize(
    ("webhook", "detail"),
    [
        ({}, "webhook.url: must be a URL"),
        ({"url": ""}, "webhook.url: must be a URL"),
        ({"url": " https://a/"}, "webhook.url: must be a URL"),
        ({"url": "https://a/\n"}, "webhook.url: must be a URL"),
        ({"url": "https://a/\x07"}, "webhook.url: must be a URL"),
        ({"url": "https://a/" + "x" * 2_039}, "webhook.url: must have at most 2048 characters"),
        ({"url": "https://a/", "signature": 1}, "webhook.signature: must be true or false"),
        ({"url": "https://a/", "events": []}, "webhook.events: must be a list out of "),
        ({"url": "https://a/", "events": ["run.started"]}, "webhook.events: must be a list out of"),
        (
            {"url": "https://a/", "events": ["run.failed", "run.started"]},
            "webhook.events: must be a list out of",
        ),
        (
            {"url": "https://a/", "events": [["run.failed"]]},
            "webhook.events: must be a list out of",
        ),
    ],
)
def test_what_is_no_webhook(webhook: object, detail: str) -> None:
    error = refusal({"tasks": [TASK], "webhook": webhook})

    assert error.code is ErrorCode.INVALID_ARGUMENT
    assert error.detail.startswith(detail)


def test_the_events_of_a_webhook_have_one_order_and_no_repetition() -> None:
    given = {"url": "https://a/", "signature": True, "events": ["run.stopped", "run.completed"] * 2}

    request = job(webhook=given)

    assert request.webhook == Webhook("https://a/", True, (EventType.COMPLETED, EventType.STOPPED))
    assert job(webhook={**given, "events": None}).webhook == Webhook("https://a/", True)


def test_an_unknown_field_of_a_webhook_is_remarked_on() -> None:
    request = job(webhook={"url": "https://a/", "signatur": True})

    assert request.remarks.warnings == (
        '"signatur" is no field of a webhook and was ignored: did you mean "signature"?',
    )


def test_a_whole_number_is_one_however_it_is_written() -> None:
    assert job(max_inflight=5.0) == job(max_inflight=5)


def test_null_is_absent_and_unknown_fields_are_ignored() -> None:
    names = [
        "type",
        "status",
        "name",
        "external_id",
        "metadata",
        "zenrows_params",
        "max_inflight",
        "priority",
        "max_attempts",
        "result_ttl_days",
        "async",
        "file_input_id",
        "webhook",
        "schedule",
        "callback",
        "politeness",
        "from_the_future",
    ]
    assert job(**dict.fromkeys(names)) == job()


def test_what_the_client_sends_is_accepted() -> None:
    sent = SubmitJobRequest.model_validate(
        {
            "tasks": [
                {"url": "https://example.com/ü", "method": "POST", "body": {"q": 1}},
                {"url": "https://example.com", "zenrows_params": {"wait": 5, "js_render": True}},
            ],
            "zenrows_params": {"custom_headers": {"Referer": "https://a/"}},
        }
    )
    document = strict_json.decode(sent.model_dump_json(exclude_unset=True).encode())
    request = parse_job(document, LIMITS)
    assert [spec.url for spec in request.specs] == [str(task.url) for task in sent.tasks or []]
    everything = strict_json.decode(sent.model_dump_json(warnings="none").encode())
    assert parse_job(everything, LIMITS) == request
    assert request.remarks == Remarks()


@pytest.mark.parametrize("document", [None, [], [TASK], "x", 5, True])
def test_a_document_that_is_no_object(document: object) -> None:
    for error in (refusal(document), add_refusal(document)):
        assert error.code is ErrorCode.INVALID_ARGUMENT
        assert "JSON object" in error.detail


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("type", "other"),
        ("type", 5),
        ("type", ["regular"]),
        ("status", "deleted"),
        ("status", True),
        ("name", 5),
        ("name", "n" * 101),
        ("external_id", "a\n"),
        ("external_id", ""),
        ("external_id", "x" * 129),
        ("external_id", 5),
        ("metadata", []),
        ("metadata", {"k": 5}),
        ("metadata", {"": "v"}),
        ("metadata", {"k": "v" * 1_025}),
        ("zenrows_params", []),
        ("zenrows_params", {"wait_for": "x" * 32_768}),
        ("max_inflight", 0),
        ("max_inflight", 10_001),
        ("max_inflight", "5"),
        ("max_inflight", 5.5),
        ("max_inflight", 1e300),
        ("max_inflight", True),
        ("priority", -1),
        ("priority", 10),
        ("max_attempts", 0),
        ("max_attempts", 11),
        ("result_ttl_days", 0),
        ("result_ttl_days", 366),
        ("async", 1),
        ("async", "true"),
        ("file_input_id", 5),
        ("webhook", "https://a/"),
        ("callback", "token"),
        ("politeness", 2),
        ("politeness.per_host", 0),
        ("politeness.per_host", 1_001),
        ("politeness.per_host", 1.5),
        ("politeness.per_host", True),
        ("politeness.per_host_rate", 0),
        ("politeness.per_host_rate", 0.009),
        ("politeness.per_host_rate", 1_000.5),
        ("politeness.per_host_rate", 10**400),
        ("politeness.per_host_rate", "1"),
        ("politeness.per_host_rate", False),
        ("politeness.robots", 1),
        ("politeness.perhost", 2),
        ("politeness.perhost", None),
        ("tasks", {}),
        ("tasks", "https://a/"),
    ],
)
def test_a_wrong_field_is_named(name: str, value: object) -> None:
    field, _, word = name.partition(".")
    error = refusal({"tasks": [TASK], field: {word: value} if word else value})
    assert error.code is ErrorCode.INVALID_ARGUMENT
    assert error.detail.startswith(f"{name}: ")
    assert len(error.detail) < 300
    assert error.invalid_tasks == ()


@pytest.mark.parametrize(
    ("params", "field", "reason"),
    [
        ({"nope": 1}, "zenrows_params.nope", Reason.UNKNOWN_PARAM),
        ({"wait": None}, "zenrows_params.wait", Reason.INVALID_PARAM_VALUE),
        ({"mode": "auto", "js_render": True}, "zenrows_params.js_render", "invalid_param_value"),
    ],
)
def test_a_wrong_param_of_the_job_is_named(params: object, field: str, reason: str) -> None:
    error = refusal({"tasks": [TASK], "zenrows_params": params})
    assert error.detail.startswith(f"{field}: ")
    assert reason in error.detail


def test_every_bad_task_is_listed_and_none_is_kept() -> None:
    tasks: list[Any] = [TASK, {"url": "ftp://a/"}, TASK, 5, {"url": "http://a/", "method": "PUT"}]
    error = refusal({"tasks": tasks * 1_000})
    assert error.code is ErrorCode.INVALID_ARGUMENT
    assert error.detail == "3000 of 5000 tasks are invalid; nothing was created"
    assert [bad.index for bad in error.invalid_tasks] == [
        start + offset for start in range(0, 5_000, 5) for offset in (1, 3, 4)
    ]
    assert [bad.reason for bad in error.invalid_tasks[:3]] == [
        Reason.UNSUPPORTED_SCHEME,
        Reason.MALFORMED_URL,
        Reason.UNSUPPORTED_METHOD,
    ]
    for bad in error.invalid_tasks[:3]:
        ClientInvalidTask.model_validate(
            {"index": bad.index, "reason": bad.reason.value, "value": bad.value}
        )


def test_tasks_are_judged_under_the_params_of_the_job() -> None:
    error = refusal(
        {"tasks": [TASK, {**TASK, "method": "POST"}], "zenrows_params": {"js_render": True}}
    )
    assert [(bad.index, bad.reason) for bad in error.invalid_tasks] == [
        (1, Reason.METHOD_PARAM_CONFLICT)
    ]


def test_order_and_duplicates_are_kept() -> None:
    tasks = [{"url": f"https://example.com/{number % 3}"} for number in range(9)]
    request = parse_job({"tasks": tasks}, LIMITS)
    assert [spec.url for spec in request.specs] == [task["url"] for task in tasks]


@pytest.mark.parametrize("document", [{}, {"tasks": []}, {"tasks": None}, {"status": "closed"}])
def test_an_empty_closed_job_is_refused(document: object) -> None:
    assert refusal(document).detail.startswith("tasks: ")


@pytest.mark.parametrize("extra", [{}, {"tasks": []}, {"tasks": None}])
def test_an_empty_open_job_is_accepted(extra: dict[str, Any]) -> None:
    request = parse_job({"status": "open", **extra}, LIMITS)
    assert request.open
    assert request.specs == []


def test_tasks_and_a_file_exclude_one_another() -> None:
    assert refusal({"tasks": [TASK], "file_input_id": "x"}).detail.startswith("file_input_id: ")
    assert parse_job({"tasks": [], "file_input_id": "x"}, LIMITS).file_input_id == "x"
    with pytest.raises(ConveyorError) as caught:
        parse_job({"file_input_id": "x", "status": "open"}, LIMITS)
    assert caught.value.code is ErrorCode.FILE_INPUT_UNSUPPORTED_FOR_JOB_TYPE


DAILY = {"rate": {"every": 1, "unit": "day"}}


def test_a_scheduled_job() -> None:
    scheduled = job(type="scheduled", schedule=DAILY)

    assert scheduled.schedule == Schedule(rate=Rate(1, "day"))
    assert scheduled.overlap is Overlap.SKIP
    assert job(type="scheduled", schedule={**DAILY, "overlap": "wait"}).overlap is Overlap.WAIT
    assert job(type="scheduled", schedule={**DAILY, "overlap": None}).overlap is Overlap.SKIP
    by_file = parse_job({"type": "scheduled", "schedule": DAILY, "file_input_id": "x"}, LIMITS)
    assert (by_file.file_input_id, by_file.specs) == ("x", [])


@pytest.mark.parametrize(
    ("fields", "detail"),
    [
        ({}, "schedule: a scheduled job needs one"),
        ({"schedule": "daily"}, "schedule: must be a JSON object"),
        ({"schedule": {}}, "schedule: needs exactly one of"),
        ({"schedule": {**DAILY, "overlap": "queue"}}, "schedule.overlap: must be skip or wait"),
        ({"schedule": {**DAILY, "overlap": ["skip"]}}, "schedule.overlap: must be skip or wait"),
        ({"schedule": {**DAILY, "timezone": "z" * 65}}, "schedule.timezone: must be a name"),
        ({"schedule": DAILY, "status": "open"}, "status: a scheduled job cannot be open"),
        ({"schedule": DAILY, "callback": {"task_token": "t"}}, "callback: a scheduled job has"),
        ({"schedule": DAILY, "tasks": []}, "tasks: a closed job needs"),
    ],
    ids=repr,
)
def test_what_is_no_scheduled_job(fields: dict[str, object], detail: str) -> None:
    error = refusal({"tasks": [TASK], "type": "scheduled", **fields})

    assert error.code is ErrorCode.INVALID_ARGUMENT
    assert error.detail.startswith(detail)


def test_what_a_schedule_does_not_know_is_remarked_on() -> None:
    typo = job(type="scheduled", schedule={**DAILY, "overlapp": "wait"})
    regular = job(schedule="whenever", namee="n")

    assert typo.remarks.warnings == (
        '"overlapp" is no field of a schedule and was ignored: did you mean "overlap"?',
    )
    assert [warning[:10] for warning in regular.remarks.warnings] == ['"schedule"', '"namee" is']


def test_a_scheduled_job_cannot_be_open() -> None:
    error = refusal({"type": "scheduled", "status": "open", "tasks": [TASK]})
    assert error.detail.startswith("status: ")


def test_the_number_of_tasks_is_bounded_by_name() -> None:
    limits = Limits(max_inline_tasks=3, max_open_job_tasks=2)
    assert len(parse_job({"tasks": [TASK] * 3}, limits).specs) == 3
    error = refusal({"tasks": [TASK] * 4}, limits)
    assert error.code is ErrorCode.INVALID_ARGUMENT
    assert error.detail == "tasks: at most 3 tasks in one submit, not 4 (CONVEYOR_MAX_INLINE_TASKS)"
    assert len(parse_job({"status": "open", "tasks": [TASK] * 2}, limits).specs) == 2
    error = refusal({"status": "open", "tasks": [TASK] * 3}, limits)
    assert error.code is ErrorCode.QUOTA_EXCEEDED
    assert "at most 2 tasks" in error.detail


def test_the_limits_of_the_contract() -> None:
    assert Limits() == Limits(
        max_inline_tasks=100_000, max_add_tasks=10_000, max_open_job_tasks=100_000
    )


def add_refusal(document: object, limits: Limits = LIMITS) -> ConveyorError:
    with pytest.raises(ConveyorError) as caught:
        parse_add(document, limits, {})
    return caught.value


def test_adding() -> None:
    spec = TaskSpec("https://example.com/")
    assert parse_add({"tasks": [TASK]}, LIMITS, {}) == AddRequest([spec], last_batch=False)
    assert parse_add({"tasks": [TASK], "last_batch": None}, LIMITS, {}).last_batch is False
    assert parse_add({"tasks": [TASK, TASK], "last_batch": True, "x": 1}, LIMITS, {}) == AddRequest(
        [spec, spec],
        last_batch=True,
        remarks=Remarks(warnings=('"x" is no field of an addition of tasks and was ignored',)),
    )


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ({}, "tasks"),
        ({"tasks": []}, "tasks"),
        ({"tasks": [], "last_batch": True}, "tasks"),
        ({"tasks": TASK}, "tasks"),
        ({"tasks": [TASK], "last_batch": 1}, "last_batch"),
        ({"tasks": [TASK], "last_batch": "true"}, "last_batch"),
    ],
)
def test_adding_refused(document: object, field: str) -> None:
    assert add_refusal(document).detail.startswith(f"{field}: ")


def test_adding_is_bounded_by_name() -> None:
    limits = Limits(max_add_tasks=2)
    assert len(parse_add({"tasks": [TASK] * 2}, limits, {}).specs) == 2
    error = add_refusal({"tasks": [TASK] * 3}, limits)
    assert error.detail == "tasks: at most 2 tasks in one add, not 3"


def test_added_tasks_are_judged_under_the_params_of_the_job() -> None:
    document = {"tasks": [TASK, {**TASK, "method": "POST"}, {}]}
    with pytest.raises(ConveyorError) as caught:
        parse_add(document, LIMITS, {"js_render": "true"})
    assert [(bad.index, bad.reason) for bad in caught.value.invalid_tasks] == [
        (1, Reason.METHOD_PARAM_CONFLICT),
        (2, Reason.MALFORMED_URL),
    ]
