"""Anything at all: generated documents, and generated requests on every route that is described."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from conveyor.http.openapi_operations import STREAM_TYPE
from tests.acceptance.support_boot import Booted, boot
from tests.acceptance.support_calls import KEY, Caller, Json, any_problem_of
from tests.patient import fetched

GOOD = "http://good.invalid/"
JSON_TYPE = {"Content-Type": "application/json"}
HOURLY = {"rate": {"every": 1, "unit": "hour"}}
DOCUMENTS = 120
REQUESTS = 3
"""Requests that are generated for an operation, allowed ones and forbidden ones each."""
CONFORMANCE = [
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Booted]:
    directory = tmp_path_factory.mktemp("fuzz")
    with boot(directory, "--gateway", "fake", "--log-level", "warning") as server:
        yield server
        assert b"Traceback" not in server.output()


def bounded(examples: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Limit a test to `examples` examples, always the same ones."""
    return settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


_scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(),
)
_anything = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
_printable = st.text(st.characters(exclude_categories=["Cc", "Cs", "Zs", "Zl", "Zp"]), max_size=9)
_known_tasks = st.fixed_dictionaries(
    {"url": _printable.map(GOOD.__add__)},
    optional={
        "external_id": st.text("abc._-", min_size=1),
        "metadata": st.dictionaries(_printable.filter(bool), st.text(max_size=9), max_size=3),
        "method": st.sampled_from(["GET", "get"]),
        "zenrows_params": st.fixed_dictionaries(
            {},
            optional={
                "js_render": st.booleans(),
                "wait": st.integers(0, 30_000),
                "custom_headers": st.dictionaries(st.text("ABC-", min_size=1), _printable),
                "outputs": st.text(max_size=9) | st.integers() | st.booleans(),
            },
        ),
    },
)
_odd_tasks = st.dictionaries(
    st.sampled_from(["url", "external_id", "metadata", "method", "body", "zenrows_params"]),
    _anything,
    max_size=3,
)
_lists_of_tasks = st.one_of(
    st.lists(_known_tasks, min_size=1, max_size=3),
    st.lists(_known_tasks, min_size=1, max_size=3),
    st.lists(_known_tasks | _odd_tasks | _anything, max_size=3),
)
_fields = st.dictionaries(
    st.sampled_from(
        ["type", "status", "name", "external_id", "metadata", "zenrows_params", "max_inflight"]
        + ["priority", "max_attempts", "result_ttl_days", "async", "webhook", "callback", "odd"]
        + ["politeness"]
    ),
    _anything,
    max_size=1,
)


def test_no_document_makes_the_server_fail(server: Booted) -> None:
    answered: list[int] = []

    @bounded(DOCUMENTS)
    @given(tasks=_lists_of_tasks, fields=st.just({}) | _fields)
    def submit(tasks: list[Any], fields: Json) -> None:
        response = fuzzer.http.post("/jobs", json={"tasks": tasks, **fields})
        answered.append(response.status_code)
        if response.status_code == 201:
            assert response.json()["accepted_tasks"] == len(tasks)
            rows = fuzzer.results(response.json())
            assert [row["url"] for row in rows] == [task["url"] for task in tasks]
        elif response.status_code == 202:
            assert fields.get("async") is True
            assert response.json()["latest_run"]["stats"]["total"] == len(tasks)
        else:
            assert response.status_code == 400, response.text
            any_problem_of(response)

    with Caller(server.api, "key-of-the-fuzzer") as fuzzer:
        submit()
        for job in fuzzer.get("/jobs", limit=100)["jobs"]:
            assert fuzzer.wait(job)["status"] == "completed"
    assert min(answered.count(201), answered.count(400)) > DOCUMENTS // 10


_rates = st.fixed_dictionaries(
    {"every": st.integers(-1, 600) | _anything, "unit": st.sampled_from(["minute", "day", "week"])}
)
_days = st.lists(st.sampled_from(["mon", "sun", 1, 29, 31, 32, None]), max_size=3) | _anything
_cadences = st.dictionaries(
    st.sampled_from(["daily", "weekly", "monthly"]),
    st.just({}) | st.fixed_dictionaries({"days": _days}) | _anything,
    max_size=2,
)
_times = st.lists(st.sampled_from(["00:00", "02:00", "23:00", "09:30", "24:00"]), max_size=3)
_schedules = st.fixed_dictionaries(
    {},
    optional={
        "at": st.sampled_from(["2099-02-28T09:00", "1969-12-31T23:59:59", "9999-12-31T00:00"])
        | st.datetimes().map(str)
        | _anything,
        "rate": _rates | _anything,
        "calendar": st.fixed_dictionaries({"times_of_day": _times, "cadence": _cadences}),
        "timezone": st.sampled_from(["Europe/Berlin", "Africa/Cairo", "UTC", "../etc", "Nowhere"])
        | _anything,
        "overlap": st.sampled_from(["skip", "wait"]) | _anything,
    },
)
_right_cadences: st.SearchStrategy[Json] = st.one_of(
    st.just({"daily": {}}),
    st.lists(st.sampled_from(["mon", "sun"]), min_size=1).map(
        lambda days: {"weekly": {"days": days}}
    ),
    st.lists(st.integers(1, 31), min_size=1).map(lambda days: {"monthly": {"days": days}}),
)
_right_schedules = st.one_of(
    st.fixed_dictionaries(
        {
            "rate": st.fixed_dictionaries(
                {"every": st.integers(1, 366), "unit": st.sampled_from(["minute", "hour", "day"])}
            )
        },
        optional={"overlap": st.sampled_from(["skip", "wait", None])},
    ),
    st.fixed_dictionaries(
        {
            "calendar": st.fixed_dictionaries(
                {
                    "times_of_day": st.lists(st.sampled_from(["00:00", "02:00"]), min_size=1),
                    "cadence": _right_cadences,
                }
            ),
            "timezone": st.sampled_from(["Europe/Berlin", "Africa/Cairo", "Pacific/Apia"]),
        }
    ),
)


def test_no_schedule_makes_the_server_fail(server: Booted) -> None:
    answered: list[int] = []

    @bounded(DOCUMENTS)
    @given(
        schedule=_right_schedules | _schedules | _anything,
        state=st.sampled_from(["paused", "active"]) | _anything,
    )
    def change(schedule: Any, state: Any) -> None:
        task = {"url": f"{GOOD}page"}
        made = fuzzer.http.post(
            "/jobs", json={"type": "scheduled", "schedule": schedule, "tasks": [task]}
        )
        body: dict[str, Any] = {"content": json.dumps(schedule), "headers": JSON_TYPE}
        put = fuzzer.http.put(f"{path}/schedule", **body)
        shown = fuzzer.http.post("/schedule/preview", **body)
        set_to = fuzzer.http.post(f"{path}/schedule/state", json={"schedule_state": state})
        assert made.status_code in (201, 400), made.text
        assert (put.status_code == 200) == (made.status_code == 201), (made.text, put.text)
        assert shown.status_code == 200 or put.status_code == 400, shown.text
        assert set_to.status_code == (200 if state in ("paused", "active") else 400)
        for response in (made, put, shown, set_to):
            answered.append(response.status_code)
            if response.is_error:
                any_problem_of(response)
        fires = fuzzer.get(f"{path}/schedule")["fires"]
        assert [fire["at"] for fire in fires] == sorted({fire["at"] for fire in fires})

    with Caller(server.api, "key-of-the-fuzzer-of-schedules") as fuzzer:
        job = fuzzer.submit(f"{GOOD}page", type="scheduled", schedule=HOURLY)
        path = f"/jobs/{job['job_id']}"
        change()
    assert min(answered.count(201), answered.count(400)) > DOCUMENTS // 20


def operations(server: Booted) -> dict[str, APIOperation[Any, Any, Any, Any]]:
    """Every operation of the document that the server serves, without streams, which do not end."""
    schema = schemathesis.openapi.from_dict(fetched(f"{server.origin}/openapi.json").json())
    found = [result.ok() for result in schema.get_all_operations() if isinstance(result, Ok)]
    return {
        f"{operation.method} {operation.path}": operation
        for operation in found
        if STREAM_TYPE not in str(operation.definition.raw["responses"])
    }


def generated(operation: APIOperation[Any, Any, Any, Any], mode: GenerationMode) -> list[Case[Any]]:
    """Requests that the document allows, or forbids; always the same ones."""
    cases: list[Case[Any]] = []

    @bounded(REQUESTS)
    @given(operation.as_strategy(generation_mode=mode))
    def collect(case: Case[Any]) -> None:
        cases.append(case)

    with contextlib.suppress(Unsatisfiable):
        collect()
    return cases


@pytest.mark.parametrize("mode", GenerationMode)
@pytest.mark.extended
def test_every_answer_to_a_generated_request_is_a_described_one(
    server: Booted, mode: GenerationMode
) -> None:
    asked = 0
    with Caller(server.api) as caller:
        for name, operation in operations(server).items():
            for case in generated(operation, mode):
                point_at_something(caller, case, mode, is_scheduled="/schedule" in name)
                response = send(server, case)
                asked += 1
                assert response.status_code not in (500, 503), f"{name}: {response.text}"
                if response.status_code != 405:
                    case.validate_response(response, checks=CONFORMANCE)
    assert asked > 50


def point_at_something(
    caller: Caller, case: Case[Any], mode: GenerationMode, *, is_scheduled: bool
) -> None:
    """Let the ids in the path of an allowed request be such as exist."""
    if mode is GenerationMode.POSITIVE and case.path_parameters:
        if is_scheduled:
            made = caller.submit(f"{GOOD}page", type="scheduled", schedule=HOURLY)
            case.path_parameters = {**case.path_parameters, "job_id": made["job_id"]}
            return
        [row] = caller.scraped(f"{GOOD}page")
        known = {name: row[name] for name in ("job_id", "run_id", "task_id")}
        if "delivery_id" in case.path_parameters:
            tested = caller.http.post("/webhook/test", json={"url": "http://127.0.0.1:1/"})
            known["delivery_id"] = tested.json()["event_id"]
        case.path_parameters = {**case.path_parameters, **known}


def send(server: Booted, case: Case[Any]) -> Any:
    """The answer to a generated request, under the key of the tests."""
    return case.call(base_url=server.origin, headers={"X-API-Key": KEY})
