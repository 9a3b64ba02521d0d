"""Actions of pages: who may change what, by which form, and under whose name."""

from __future__ import annotations

import html
import logging
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from conveyor.domain.api_keys import KeySealer, key_hash
from conveyor.http.app import V1_ROUTES
from conveyor.http.auth import open_api_keys, open_operator_keys
from conveyor.http.pages import actions
from conveyor.http.pages.actions import ACTIONS, BULK, LETTER_ACTIONS
from conveyor.http.pages.routes import PAGES, PREVIEW
from conveyor.http.pages.session import COOKIE, ROOT, SIGN_IN, SIGN_OUT, SessionOptions
from conveyor.http.pages.views import LETTERS
from tests.unit.http_api import KEY, OTHER_KEY, Api, open_api
from tests.unit.scheduled_api import RATE, submit

OPERATOR, READER = "key-of-an-operator", "key-of-a-reader"
LOCAL, PUBLIC = "http://127.0.0.1:9000", "https://conveyor.test"
TOKEN = re.compile(r'name="token" value="([0-9a-f]{64})"')
SESSIONS = SessionOptions(
    on_loopback=True,
    operators=open_operator_keys(f"{key_hash(OPERATOR)} acts\n{key_hash(READER)}\n"),
)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    keys = open_api_keys(f"{key_hash(KEY)},{key_hash(OTHER_KEY)}")
    async with open_api(tmp_path / "data", api_keys=keys, sessions=SESSIONS) as opened:
        yield opened


class Person:
    """Somebody with a browser: keeps the cookie and sends the forms of pages."""

    def __init__(self, api: Api, origin: str) -> None:
        self.http = httpx.AsyncClient(transport=api.bare._transport, base_url=origin)
        self.form_page = f"{BULK}?action=pause"

    async def signed_in(self, key: str) -> Person:
        answer = await self.http.post(SIGN_IN, data={"key": key, "next": ROOT})
        assert answer.status_code == 303, answer.text
        assert COOKIE in self.http.cookies
        self.form_page = ROOT
        return self

    async def token(self, page: str | None = None) -> str:
        """The token of the forms on a page, by default on one that always has one."""
        found = TOKEN.search((await self.http.get(page or self.form_page)).text)
        assert found, page
        return found[1]

    async def send(self, path: str, *, page: str | None = None, **fields: str) -> httpx.Response:
        """Send a form with the token of a page."""
        return await self.http.post(path, data={"token": await self.token(page), **fields})


async def person(api: Api, key: str | None = None) -> Person:
    """Somebody signed in with a key; without one, the developer on this machine."""
    if key is None:
        return Person(api, LOCAL)
    return await Person(api, PUBLIC).signed_in(key)


def paths(job: dict[str, Any]) -> list[str]:
    """Every path of a form, of a job's."""
    ids = {
        "job_id": job["job_id"],
        "run_id": job["latest_run"]["run_id"],
        "delivery_id": "01ARZ3NDEKTSV4RRFFQ69G5FAV",
        "letter_id": "0",
    }
    forms = [path.format(**ids) for path in (*ACTIONS, *LETTER_ACTIONS)]
    return [*forms, f"{BULK}?action=stop"]


def page_of(job: dict[str, Any]) -> str:
    return f"{ROOT}/jobs/{job['job_id']}"


async def state(api: Api, job: dict[str, Any], key: str = KEY) -> str:
    client = api.client if key == KEY else api.foreign
    run: dict[str, Any] = (await client.get(f"/v1/jobs/{job['job_id']}")).json()["latest_run"]
    return str(run.get("pause_state") or run["status"])


# -- what a person can do --


@pytest.mark.slow
@pytest.mark.parametrize("key", [None, KEY, OPERATOR])
async def test_a_run_is_paused_resumed_stopped_and_run_again(api: Api, key: str | None) -> None:
    job = await api.submit(2)
    who, path = await person(api, key), page_of(job)

    for action, expected in (("pause", "paused"), ("resume", "running"), ("stop", "stopped")):
        answer = await who.send(f"{path}/{action}", page=path)
        assert (answer.status_code, answer.headers.get("Location")) == (303, path), answer.text
        assert await state(api, job) == expected
    answer = await who.send(f"{path}/rerun", page=path)
    assert answer.status_code == 303, answer.text
    runs = (await api.client.get(f"/v1/jobs/{job['job_id']}/runs")).json()["runs"]
    assert [run["run_sequence"] for run in runs] == [2, 1]


async def test_failed_tasks_are_run_again_by_group(api: Api) -> None:
    job = await api.submit(4)
    await api.drain(job, failing=2)
    path = page_of(job)
    failures = f"/v1/jobs/{job['job_id']}/runs/{job['latest_run']['run_id']}/failures"
    [group] = (await api.client.get(failures)).json()["groups"]
    who = await person(api)
    shown = (await who.http.get(path)).text
    assert f'name="group" value="{group["group"]}"' in shown
    assert f"/v1/jobs/{job['job_id']}/rerun?status=failed&amp;group={group['group']}" in shown

    answer = await who.send(f"{path}/rerun", page=path, status="failed", group=group["group"])

    assert answer.status_code == 303
    run = (await api.client.get(f"/v1/jobs/{job['job_id']}")).json()["latest_run"]
    assert (run["run_sequence"], run["stats"]["inherited"]) == (2, 2)


async def test_rows_of_a_group_come_with_its_rerun(api: Api) -> None:
    job = await api.submit(2)
    await api.drain(job, failing=1)
    who, path = await person(api), page_of(job)
    run = f"{path}/runs/{job['latest_run']['run_id']}"
    shown = (await who.http.get(f"{run}/results?status=failed")).text
    assert "Run the failed tasks again" in shown
    [group] = re.findall(r"group=([a-z2-7]{12})", (await who.http.get(path)).text)[:1]
    shown = (await who.http.get(f"{run}/results?status=failed&group={group}")).text
    assert "Run this group again" in shown
    assert (await who.send(f"{path}/rerun", page=path, status="failed", group=group)).is_redirect
    assert "Run this group again" not in (await who.http.get(run)).text


async def test_whoever_sees_all_callers_acts_with_the_key_of_the_job(api: Api) -> None:
    job_id = await submit(api, RATE)
    for key in (None, OPERATOR):
        who = await person(api, key)
        path = f"{ROOT}/jobs/{job_id}/schedule"
        for action, expected in (("pause", "paused"), ("resume", "active")):
            answer = await who.send(f"{path}/{action}", page=path)
            assert (answer.status_code, answer.headers["Location"]) == (303, path)
            job = (await api.client.get(f"/v1/jobs/{job_id}")).json()
            assert job["schedule_state"] == expected
            assert await sealed_key(api, job_id) == KEY
    answer = await who.send(f"{ROOT}/jobs/{job_id}/rerun", page=path)
    assert answer.status_code == 303
    assert (await api.client.get(f"/v1/jobs/{job_id}")).json()["latest_run"]["run_sequence"] == 1
    assert await sealed_key(api, job_id) == KEY


async def sealed_key(api: Api, job_id: str) -> str:
    """The key that a job's tasks are worked with."""
    job = await api.binding.jobs.find_job(job_id)
    assert job is not None
    return KeySealer([api.binding.root_secret]).unseal(job)


async def test_a_run_and_a_job_are_deleted(api: Api) -> None:
    await api.submit(1)
    job = await api.submit(1)
    await api.drain(job)
    path, who = page_of(job), await person(api)
    run = f"{path}/runs/{job['latest_run']['run_id']}"

    assert (await who.send(f"{run}/delete", page=path)).headers["Location"] == path
    assert (await api.client.get(f"/v1/jobs/{job['job_id']}/runs")).json()["runs"] == []
    answer = await who.send(f"{path}/delete")
    assert answer.headers["Location"] == f"{ROOT}/jobs"
    assert (await api.client.get(f"/v1/jobs/{job['job_id']}/runs")).status_code == 404


async def test_an_archive_of_the_results_is_made_and_fetched(api: Api) -> None:
    job = await api.submit(1)
    await api.drain(job)
    path, who = page_of(job), await person(api)
    run = f"{path}/runs/{job['latest_run']['run_id']}"
    asked = await who.send(f"{run}/exports", page=path, format="jsonl")
    address = asked.headers["Location"]
    assert (asked.status_code, address.startswith(f"{run}/exports/")) == (303, True)
    assert "being made" in (await who.http.get(address)).text
    assert (await who.http.get(f"{address}.json")).json()["format"] == "jsonl"
    refused = await who.send(f"{run}/exports", page=path, format="tar")
    assert refused.status_code == 400


async def test_a_refusal_is_a_page_in_words_with_the_status_of_the_api(api: Api) -> None:
    job = await api.submit(1)
    path, who = page_of(job), await person(api)
    answer = await who.send(f"{path}/rerun", page=path)
    assert answer.status_code == 409
    assert answer.headers["Content-Type"].startswith("text/html")
    assert "The run has not ended" in answer.text
    assert f'href="{path}"' in answer.text


# -- who may not --


@pytest.mark.slow
@pytest.mark.guarantee("G15")
async def test_two_callers_change_and_see_nothing_of_each_other(api: Api) -> None:
    job = await api.submit(2, name="of-alice")
    bob = await person(api, OTHER_KEY)
    token = await bob.token()
    before = await state(api, job)
    for path in paths(job):
        answer = await bob.http.post(path, data={"token": token, "count": "0"})
        expected = 200 if path.startswith(BULK) else 404
        assert answer.status_code == expected, path
    assert await state(api, job) == before
    ids = {
        "job_id": job["job_id"],
        "run_id": job["latest_run"]["run_id"],
        "task_id": (await api.tasks_of(job["latest_run"]["run_id"]))[0].task_id,
        "delivery_id": "01ARZ3NDEKTSV4RRFFQ69G5FAV",
        "export_id": "01ARZ3NDEKTSV4RRFFQ69G5FAV",
    }
    pages = [address for path in PAGES for address in (path, f"{path}.json")]
    for path in [*pages, PREVIEW]:
        address = path.format(**ids)
        answer = await bob.http.get(address)
        is_open = "{" not in path and not path.startswith(LETTERS)
        assert answer.status_code == (200 if is_open else 404), address
        assert "of-alice" not in answer.text
        # The way back from a page that is none names what was asked for.
        assert "{" in path or job["job_id"] not in answer.text


async def test_every_form_of_a_reading_operator_is_refused(api: Api) -> None:
    job = await api.submit(2)
    reader = await person(api, READER)
    token = await reader.token()
    assert job["job_id"] in (await reader.http.get(f"{ROOT}/jobs")).text
    for path in paths(job):
        answer = await reader.http.post(path, data={"token": token, "count": "1"})
        assert answer.status_code == 403, path
    assert await state(api, job) == "running"
    shown = (await reader.http.get(page_of(job))).text
    assert "/stop" not in shown


@pytest.mark.slow
async def test_a_form_without_the_token_of_the_viewer_changes_nothing(api: Api) -> None:
    job = await api.submit(2)
    for key in (None, KEY, OPERATOR):
        who = await person(api, key)
        other = await (await person(api, OTHER_KEY)).token()
        local = await (await person(api)).token()
        wrong = [None, "", other, "f" * 64, *([] if key is None else [local])]
        for path in paths(job):
            for token in wrong:
                fields = {"count": "1"} | ({} if token is None else {"token": token})
                answer = await who.http.post(path, data=fields)
                assert answer.status_code == 403, (key, path, token)
    assert await state(api, job) == "running"


async def test_a_form_from_another_origin_changes_nothing(api: Api) -> None:
    job = await api.submit(2)
    who = await person(api)
    token = await who.token()
    for origin in ("https://evil.test", "null"):
        for site in ("cross-site", "same-site", "none"):
            headers = {"Origin": origin, "Sec-Fetch-Site": site}
            for path in paths(job):
                answer = await who.http.post(path, data={"token": token}, headers=headers)
                assert answer.status_code == 403
    assert await state(api, job) == "running"


async def test_a_form_of_our_own_page_without_referrer_is_taken(api: Api) -> None:
    job = await api.submit(2)
    who = await person(api)
    token, path = await who.token(), page_of(job)
    headers = {"Origin": "null", "Sec-Fetch-Site": "same-origin"}
    answer = await who.http.post(f"{path}/pause", data={"token": token}, headers=headers)
    assert answer.status_code == 303


async def test_whoever_is_not_signed_in_gets_the_sign_in_page(api: Api) -> None:
    job = await api.submit(2)
    stranger = Person(api, PUBLIC)
    for path in paths(job):
        answer = await stranger.http.post(path, data={"token": "x"})
        assert answer.status_code == 401
        assert 'name="key"' in answer.text
    assert await state(api, job) == "running"


# -- forms --


async def test_what_is_no_form_is_refused(api: Api) -> None:
    job = await api.submit(1)
    who, path = await person(api), page_of(job)
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    for content, headers, status in (
        (b"{}", {"Content-Type": "application/json"}, 415),
        (b"token=%ff", form, 400),
        (b"a=1&" * 200, form, 400),
        (b"token=" + b"a" * 70_000, form, 413),
    ):
        answer = await who.http.post(f"{path}/stop", content=content, headers=headers)
        assert answer.status_code == status, content[:20]
    assert await state(api, job) == "running"


# -- the log --


async def test_what_an_operator_does_is_a_line_in_the_log(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    job = await api.submit(1)
    who, path = await person(api, OPERATOR), page_of(job)
    # An installation that logs warnings alone keeps its audit lines.
    with caplog.at_level(logging.WARNING, "conveyor.http"):
        await who.send(f"{path}/pause", page=path)
        await who.send(f"{path}/rerun", page=path)
        await (await person(api)).send(f"{path}/resume", page=path)
    lines = [one.__dict__ for one in caplog.records if "operator" in one.message]
    assert [(one["action"], one["outcome"]) for one in lines] == [
        ("pause", "done"),
        ("rerun", "run_not_terminal"),
    ]
    assert {one["operator"] for one in lines} == {key_hash(OPERATOR)}
    assert {one["job_id"] for one in lines} == {job["job_id"]}
    assert OPERATOR not in caplog.text


# -- all that match --


async def test_all_that_match_are_changed_once_their_number_is_typed(api: Api) -> None:
    jobs = [await api.submit(1, name=f"night-{n}") for n in range(3)]
    other = await api.submit(1, name="day")
    who = await person(api)
    address = f"{BULK}?action=pause&name=night"
    asked = await who.http.get(address)
    assert asked.status_code == 200
    assert "Type 3 to go on" in asked.text
    counted = await who.http.get(address.replace("?", ".json?"))
    assert (counted.json()["action"], counted.json()["count"]) == ("pause", 3)

    for wrong, why in (("", "not a number"), ("2", "another one"), ("three", "not a number")):
        answer = await who.send(address, page=address, count=wrong)
        assert answer.status_code == 409
        assert "3 now" in answer.text
        assert why in answer.text
    assert [await state(api, job) for job in jobs] == ["running"] * 3
    answer = await who.send(address, page=address, count="3")
    assert answer.status_code == 200
    assert "Done for 3 of 3 jobs" in answer.text
    assert [await state(api, job) for job in jobs] == ["paused"] * 3
    assert await state(api, other) == "running"


@pytest.mark.parametrize("typed", ["1,2", " 1 2 ", "1.2", "012"])
async def test_a_number_may_be_typed_as_it_is_shown(api: Api, typed: str) -> None:
    for _ in range(12):
        await api.submit(1, name="night")
    who = await person(api)
    address = f"{BULK}?action=pause&name=night"
    answer = await who.send(address, page=address, count=typed)
    assert "Done for 12 of 12 jobs" in answer.text


@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize("action", ["pause", "delete"])
async def test_jobs_beyond_the_most_of_one_action_come_next(
    api: Api, monkeypatch: pytest.MonkeyPatch, key: str | None, action: str
) -> None:
    monkeypatch.setattr(actions, "MOST_LOOKED", 3)
    jobs = [await api.submit(1, name="night") for _ in range(7)]
    who = await person(api, key)
    address = f"{BULK}?action={action}&name=night"
    for left in ("3 and more jobs are left", "1 job is left", None):
        count = "1" if left is None else "3"
        answer = await who.send(address, page=address, count=count)
        assert f"Done for {count} of {count} job" in answer.text
        if left is None:
            assert "left" not in answer.text
            break
        assert left in answer.text
        found = re.search(r'<a href="([^"]+)">Go on with them', answer.text)
        assert found
        address = html.unescape(found[1])
    for job in jobs:
        shown = (await api.client.get(f"/v1/jobs/{job['job_id']}")).json()
        if action == "delete":
            assert shown["status"] == "deleted"
        else:
            assert shown["latest_run"]["pause_state"] == "paused"


async def test_a_job_whose_runs_were_deleted_keeps_its_page(api: Api) -> None:
    job = await api.submit(1, name="Emptied")
    await api.drain(job)
    who = await person(api)
    path = f"{page_of(job)}/runs/{job['latest_run']['run_id']}/delete"
    gone = await who.send(path)
    shown = await who.http.get(gone.headers["Location"])
    assert shown.status_code == 200
    assert "Emptied" in shown.text
    assert "no run any more" in shown.text
    twin = await who.http.get(f"{page_of(job)}.json")
    assert twin.json()["job"]["job_id"] == job["job_id"]
    await who.send(f"{page_of(job)}/delete", page=page_of(job))
    assert (await who.http.get(page_of(job))).status_code == 404


async def test_a_number_that_no_longer_holds_changes_nothing(api: Api) -> None:
    await api.submit(1, name="night")
    who = await person(api)
    address = f"{BULK}?action=delete&name=night"
    token = await who.token(address)
    late = await api.submit(1, name="night too")
    answer = await who.http.post(address, data={"token": token, "count": "1"})
    assert answer.status_code == 409
    assert "2 now" in answer.text
    assert await state(api, late) == "running"


async def test_jobs_that_refuse_are_counted_by_their_reason(api: Api) -> None:
    ended = await api.submit(1)
    await api.drain(ended)
    await api.submit(1)
    who = await person(api, KEY)
    address = f"{BULK}?action=rerun"
    answer = await who.send(address, page=address, count="2")
    assert "Done for 1 of 2 jobs" in answer.text
    assert "1 left as they are: <code>run_not_terminal</code>" in answer.text


async def test_a_bulk_action_of_one_caller_is_about_its_jobs_alone(api: Api) -> None:
    job = await api.submit(1)
    bob = await person(api, OTHER_KEY)
    address = f"{BULK}?action=delete"
    answer = await bob.http.post(address, data={"token": await bob.token(), "count": "1"})
    assert answer.status_code == 409
    assert await state(api, job) == "running"


@pytest.mark.parametrize("query", ["", "?action=explode", "?action=stop&state=odd"])
async def test_a_bulk_action_that_is_none_is_refused(api: Api, query: str) -> None:
    await api.submit(1)
    who = await person(api)
    assert (await who.http.get(f"{BULK}{query}")).status_code == 400
    assert (await who.send(f"{BULK}{query}", count="1")).status_code == 400


# -- sign-in --


async def test_the_key_of_a_person_is_in_no_page_cookie_or_log(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    await api.submit(1)
    with caplog.at_level(logging.DEBUG):
        who = await person(api, KEY)
        pages = [await who.http.get(path) for path in PAGES if "{" not in path]
        failed = await who.http.post(SIGN_IN, data={"key": f"{KEY}x", "next": f"{ROOT}?k"})
    for answer in [*pages, failed]:
        assert KEY not in answer.text
        assert KEY not in str(answer.headers)
    assert KEY not in who.http.cookies[COOKIE]
    assert KEY not in caplog.text
    assert failed.status_code == 401


async def test_the_cookie_is_no_key_of_the_api(api: Api) -> None:
    job = await api.submit(1)
    who = await person(api, KEY)
    ids = dict.fromkeys(("task_id", "export_id", "delivery_id", "input_id"), "0" * 26)
    ids |= {"job_id": job["job_id"], "run_id": job["latest_run"]["run_id"]}
    for path, methods in V1_ROUTES.items():
        for method in methods:
            answer = await who.http.request(method, path.format(**ids), json={})
            assert COOKIE in answer.request.headers["Cookie"]
            assert answer.status_code == 401, (method, path)


async def test_signing_out_ends_it(api: Api) -> None:
    who = await person(api, KEY)
    answer = await who.send(SIGN_OUT, page=ROOT)
    assert (answer.status_code, answer.headers["Location"]) == (303, SIGN_IN)
    assert (await who.http.get(ROOT)).status_code == 401


async def test_an_unknown_key_a_forged_cookie_and_no_cookie_get_the_same_page(api: Api) -> None:
    stranger = Person(api, PUBLIC)
    without = await stranger.http.get(ROOT)
    forged = await stranger.http.get(ROOT, headers={"Cookie": f"{COOKIE}=AAAA"})
    proxied = await Person(api, LOCAL).http.get(ROOT, headers={"X-Forwarded-For": "10.0.0.1"})
    assert without.status_code == forged.status_code == proxied.status_code == 401
    assert without.text == forged.text == proxied.text
    refused = [
        await stranger.http.post(SIGN_IN, data={"key": key}) for key in ("key-of-nobody", "a b", "")
    ]
    assert {answer.status_code for answer in refused} == {401}
    assert len({answer.text for answer in refused}) == 1
    assert "Set-Cookie" not in refused[0].headers


async def test_over_http_elsewhere_the_page_says_that_it_needs_https(api: Api) -> None:
    who = Person(api, "http://conveyor.test")
    asked = await who.http.get(ROOT)
    assert "needs https" in asked.text
    assert 'name="key"' not in asked.text
    sent = await who.http.post(SIGN_IN, data={"key": KEY})
    assert sent.status_code == 403
    assert "Set-Cookie" not in sent.headers


async def test_too_many_sign_ins_are_told_to_wait(api: Api) -> None:
    who = Person(api, PUBLIC)
    for _ in range(20):
        assert (await who.http.post(SIGN_IN, data={"key": "no"})).status_code == 401
    late = await who.http.post(SIGN_IN, data={"key": KEY})
    assert (late.status_code, late.headers["Retry-After"]) == (429, "1")


@pytest.mark.slow
async def test_without_a_dashboard_every_path_is_unknown(tmp_path: Path) -> None:
    async with open_api(tmp_path / "data") as api:
        for path in (*PAGES, *ACTIONS, *LETTER_ACTIONS, BULK, SIGN_IN, SIGN_OUT, f"{ROOT}/events"):
            for method in ("GET", "POST"):
                answer = await api.bare.request(method, path)
                assert answer.status_code == 404, (method, path)
