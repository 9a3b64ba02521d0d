"""Pages of a fleet: a sign-in at one api counts at the other, a change there is the job's, and an
operator sees what the fleet gave up."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import httpx
import pytest

from conveyor.domain.api_keys import key_hash
from conveyor.http.pages.session import COOKIE, ROOT, SIGN_IN
from conveyor.http.pages.views import LETTERS
from conveyor.prod.sqs.messages import NO_MESSAGE
from conveyor.testing.fleet import RoleFleet
from tests.acceptance.support_dashboard import chromium
from tests.acceptance.support_fleet import fleet, services
from tests.acceptance.support_wire import ENDED, KEY, eventually, target
from tests.acceptance.test_dashboard_browser import NARROW, WIDE, visit
from tests.conformance.emulators import REGION
from tests.patient import SECONDS

pytestmark = [
    pytest.mark.server,
    pytest.mark.slow,
    pytest.mark.extended,
    pytest.mark.timeout(600),
]

OPERATOR = "key-of-an-operator"
PROXIED = {"X-Forwarded-For": "10.0.0.1", "X-Forwarded-Proto": "https"}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RoleFleet]:
    settings: dict[str, Any] = {
        "dashboard": "on",
        "api_keys": key_hash(KEY),
        "operator_keys": f"{key_hash(OPERATOR)} acts",
        "log_level": "info",
    }
    with fleet(tmp_path_factory.mktemp("fleet"), apis=2, workers=1, **settings) as started:
        yield started


def signed_in(origin: str, key: str) -> dict[str, str]:
    """Sign in at one api; the headers of a browser from then on."""
    answer = httpx.post(f"{origin}{SIGN_IN}", data={"key": key}, headers=PROXIED, timeout=SECONDS)
    assert answer.status_code == 303, answer.text
    cookie = answer.headers["Set-Cookie"].partition(";")[0]
    assert cookie.startswith(f"{COOKIE}=")
    assert key not in cookie
    return {**PROXIED, "Cookie": cookie}


@pytest.fixture
def calls(running: RoleFleet) -> Iterator[httpx.Client]:
    """A client of the API with the caller's key."""
    headers = {"X-API-Key": KEY}
    with httpx.Client(base_url=running.apis[0].info.api, headers=headers, timeout=60) as client:
        yield client


def test_a_sign_in_at_one_api_counts_at_the_other(running: RoleFleet, calls: httpx.Client) -> None:
    one, other = (process.info.api.removesuffix("/v1") for process in running.apis)
    kinds = [target("gone", status=404), *(target(f"flaky{n}", flaky=1) for n in range(2))]
    submitted = {"tasks": [{"url": url} for url in [*kinds, target("good")]], "max_attempts": 1}
    job_id = calls.post("/jobs", json={**submitted, "name": "nightly"}).json()["job_id"]

    def ended() -> dict[str, object] | None:
        run: dict[str, object] = calls.get(f"/jobs/{job_id}").json()["latest_run"]
        return run if run["status"] in ENDED else None

    first = eventually(ended, "the run")
    address = f"{ROOT}/jobs/{job_id}"
    for key in (KEY, OPERATOR):
        headers = signed_in(one, key)
        page = httpx.get(f"{other}{address}", headers=headers, timeout=SECONDS)
        assert (page.status_code, "nightly" in page.text) == (200, True)
        assert key not in page.text
        assert (
            httpx.get(f"{other}/v1/jobs/{job_id}", headers=headers, timeout=SECONDS).status_code
            == 401
        )

    [token] = set(re.findall(r'name="token" value="(\w+)"', page.text))
    [group] = set(re.findall(r'name="group" value="(\w+)"', page.text)) - {
        row["failure_group"]
        for row in calls.get(f"/jobs/{job_id}/results", params={"status": "failed"}).json()[
            "results"
        ]
        if "gone" in row["url"]
    }
    form = {"token": token, "status": "failed", "group": group}
    answer = httpx.post(f"{other}{address}/rerun", data=form, headers=headers, timeout=SECONDS)
    assert (answer.status_code, answer.headers.get("Location")) == (303, address), answer.text
    eventually(lambda: (run := ended()) and run["run_id"] != first["run_id"], "the rerun")
    stats = calls.get(f"/jobs/{job_id}").json()["latest_run"]["stats"]
    assert (stats["successful"], stats["failed"], stats["inherited"]) == (3, 1, 2)

    logged = running.output().decode()
    assert key_hash(OPERATOR) in logged
    assert OPERATOR not in logged
    assert KEY not in logged


def test_strangers_get_the_sign_in_page_of_a_fleet(running: RoleFleet) -> None:
    origin = running.apis[0].info.api.removesuffix("/v1")
    for headers in (PROXIED, {**PROXIED, "Cookie": f"{COOKIE}=AAAA"}):
        answer = httpx.get(f"{origin}{ROOT}", headers=headers, timeout=SECONDS)
        assert (answer.status_code, 'name="key"' in answer.text) == (401, True)
    refused = httpx.post(
        f"{origin}{SIGN_IN}", data={"key": "of-nobody"}, headers=PROXIED, timeout=SECONDS
    )
    assert refused.status_code == 401


def bury(running: RoleFleet, *sent: tuple[str, str]) -> None:
    """Send texts to queues of the fleet."""
    sqs = boto3.client("sqs", region_name=REGION, endpoint_url=services().sqs or None)
    for queue, body in sent:
        url = sqs.get_queue_url(QueueName=f"conveyor-{running.name}-{queue}")["QueueUrl"]
        sqs.send_message(QueueUrl=url, MessageBody=body)


def test_an_operator_sees_moves_and_removes_what_the_fleet_gave_up(running: RoleFleet) -> None:
    one, other = (process.info.api.removesuffix("/v1") for process in running.apis)
    bury(
        running,
        ("control", "no message"),
        ("dead-letter", '{"type":"delete","job_id":"gone","run_id":"gone"}'),
    )
    who = signed_in(one, OPERATOR)

    def listed(origin: str) -> list[dict[str, str]]:
        found = httpx.get(f"{origin}{LETTERS}.json", headers=who, timeout=SECONDS)
        letters: list[dict[str, str]] = found.json()["letters"]
        return letters

    def both() -> list[dict[str, str]] | None:
        letters = listed(other)
        return letters if len(letters) == 2 else None

    letters = {letter.get("kind", ""): letter for letter in eventually(both, "both letters")}
    unread, delete = letters[""], letters["delete"]
    assert (unread["reason"], delete.get("reason")) == (NO_MESSAGE, None)
    assert (delete["job_id"], delete["run_id"]) == ("gone", "gone")
    page = httpx.get(f"{one}{LETTERS}", headers=who, timeout=SECONDS)
    assert NO_MESSAGE in page.text
    [token] = set(re.findall(r'name="token" value="(\w+)"', page.text))

    def act(letter: dict[str, str], action: str) -> int:
        address = f"{other}{LETTERS}/{letter['letter_id']}/{action}"
        form = {"token": token}
        return httpx.post(address, data=form, headers=who, timeout=SECONDS).status_code

    assert act(unread, "redrive") == 409
    assert (act(delete, "redrive"), act(unread, "drop")) == (303, 303)
    assert listed(one) == []
    assert act(unread, "drop") == 404
    local = httpx.get(f"{one}{LETTERS}", timeout=SECONDS)
    caller = httpx.get(f"{one}{LETTERS}", headers=signed_in(one, KEY), timeout=SECONDS)
    assert (local.status_code, caller.status_code) == (404, 404)


@pytest.mark.parametrize(("scheme", "viewport"), [("light", WIDE), ("dark", NARROW)])
def test_the_page_of_letters_is_silent_and_accessible(
    running: RoleFleet, scheme: str, viewport: dict[str, int]
) -> None:
    origin = running.apis[0].info.api.removesuffix("/v1")
    message = {"job_id": "01JOB0000000000000000000AA", "run_id": "01RVN0000000000000000000AA"}
    hostile = "<img src=//evil.test onerror=alert(1)>" + "word" * 100
    orders = ({"type": "ingest", "reason": hostile}, {"type": "task", "task_id": "0" * 26})
    texts = ["no message", *(json.dumps(message | order) for order in orders)]
    bury(running, *(("dead-letter", text) for text in texts))
    options = {
        "extra_http_headers": signed_in(origin, OPERATOR),
        "color_scheme": scheme,
        "viewport": viewport,
    }
    with chromium() as browser:
        label = f"letters-{scheme}-{viewport['width']}"
        visit(browser, origin, {"dead-letters": LETTERS}, label, **options)


def test_a_fleet_without_operators_has_no_letters_to_show(tmp_path: Path) -> None:
    with fleet(tmp_path, apis=1, workers=1, dashboard="on") as started:
        bury(started, ("dead-letter", "no message"))
        origin = started.apis[0].info.api.removesuffix("/v1")
        local = httpx.get(f"{origin}{LETTERS}.json", timeout=SECONDS)
        assert (local.status_code, local.json()["has_queue"], local.json()["letters"]) == (
            200,
            False,
            [],
        )
        assert NO_MESSAGE in started.admin("dlq", "list")
