"""The log of events over the API: listed, shown, signed anew, sent again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from zenrows.batch import verify_webhook_signature

from conveyor.domain.deliveries import DeliveryStatus, begin_attempt
from conveyor.domain.signatures import verify
from conveyor.domain.text_rules import rfc3339
from conveyor.service import deliveries as service_deliveries
from conveyor.service.deliveries import MOST_REPLAYED
from tests.unit.http_api import Api, open_api, problem_of
from tests.unit.test_http_webhook_test import TEST, Receiver, outcome_of
from tests.unit.test_ssrf_matrix import always
from tests.unit.wire_server import raw_server

LOG = "/v1/webhook/deliveries"
REPLAY = "/v1/webhook/deliveries/replay"
HOOK = {"url": "https://hooks.test/in", "signature": False}
EPOCH = "1970-01-01T00:00:00Z"


@pytest.fixture
def anyio_backend() -> str:
    """The store runs on asyncio."""
    return "asyncio"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with open_api(tmp_path / "data", lookup=always("93.184.216.34")) as opened:
        yield opened


async def logged(api: Api, path: str = LOG, **params: Any) -> list[str]:
    """The ids on all pages of a list."""
    found: list[str] = []
    while True:
        page = (await api.client.get(path, params=params)).json()
        found += [one["delivery_id"] for one in page["deliveries"]]
        if "next_cursor" not in page:
            return found
        params["cursor"] = page["next_cursor"]


async def due(api: Api) -> list[str]:
    """The ids of the deliveries that are due."""
    found = await api.binding.deliveries.due_deliveries(now=api.clock.now(), limit=2_000)
    return [one.delivery_id for one in found]


async def failed(api: Api, job: dict[str, Any], count: int) -> list[str]:
    """Put deliveries that have failed for good into the log, a second apart; their ids."""
    made = []
    for _ in range(count):
        delivery = await api.deliver(job)
        first = await api.attempt(delivery, "http_4xx:410", status=410)
        api.clock.shift(1)
        await api.attempt(first, "http_4xx:410", status=410)
        made.append(delivery.delivery_id)
    return made


async def test_the_log_is_listed_newest_first_page_by_page(api: Api) -> None:
    one, other = await api.submit(1, webhook=HOOK), await api.submit(1, webhook=HOOK)
    ids = []
    for number in range(7):
        ids.append((await api.deliver(other if number == 3 else one)).delivery_id)
        api.clock.shift(1)
    newest = ids[::-1]

    for limit in (1, 2, 3, 7, 100):
        assert await logged(api, limit=limit) == newest
    of_one = f"/v1/jobs/{one['job_id']}/webhook/deliveries"
    assert await logged(api, of_one, limit=2) == [x for x in newest if x != ids[3]]
    of_other = f"/v1/jobs/{other['job_id']}/webhook/deliveries"
    assert await logged(api, of_other) == [ids[3]]
    assert (await api.foreign.get(LOG)).json() == {"deliveries": []}


async def test_the_log_is_listed_by_state_and_time(api: Api) -> None:
    job = await api.submit(1, webhook=HOOK)
    [gone] = await failed(api, job, 1)
    noon = api.clock.now()
    good = await api.attempt(await api.deliver(job))
    api.clock.shift(1)
    waits = await api.deliver(job)

    assert await logged(api, status="failed") == [gone]
    assert await logged(api, status="delivered") == [good.delivery_id]
    assert await logged(api, status="pending") == [waits.delivery_id]
    assert await logged(api, status="dropped") == []
    assert await logged(api, since=rfc3339(noon)) == [waits.delivery_id, good.delivery_id]
    assert await logged(api, since=rfc3339(noon), status="failed") == []
    assert await logged(api, since="2199-01-01T02:00:00+02:00") == []


async def test_a_page_of_one_state_reads_a_bounded_number_of_deliveries(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_deliveries, "MOST_READ", 4)
    job = await api.submit(1, webhook=HOOK)
    [older] = await failed(api, job, 1)
    for _ in range(5):
        api.clock.shift(1)
        await api.attempt(await api.deliver(job))
    api.clock.shift(1)
    [newer] = await failed(api, job, 1)

    first = (await api.client.get(LOG, params={"status": "failed"})).json()
    assert [one["delivery_id"] for one in first["deliveries"]] == [newer]
    assert first["next_cursor"]
    for limit in (1, 2, 100):
        assert await logged(api, status="failed", limit=limit) == [newer, older]
    assert await logged(api, status="dropped") == []


async def test_a_removal_drops_what_the_newest_deliveries_owe(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_deliveries, "MOST_DROPPED", 4)
    job = await api.submit(1, webhook=HOOK)
    owed = await api.deliver(job)
    for _ in range(4):
        api.clock.shift(1)
        await api.attempt(await api.deliver(job))

    hook = f"/v1/jobs/{job['job_id']}/webhook"
    assert (await api.client.delete(hook)).status_code == 204
    # It is older than those that are looked at: a worker drops it when it is due.
    assert await logged(api, status="pending") == [owed.delivery_id]


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"status": "lost"}, "status"),
        ({"since": "yesterday"}, "since"),
        ({"since": "2026-01-31"}, "since"),
        ({"since": "2026-01-31T12:00:00"}, "since"),
        ({"since": ""}, "since"),
        ({"since": "1769860800000"}, "since"),
        ({"limit": "0"}, "limit"),
        ({"limit": "101"}, "limit"),
        ({"cursor": "nonsense"}, "cursor"),
    ],
)
async def test_what_a_list_refuses(api: Api, params: dict[str, str], field: str) -> None:
    problem = problem_of(
        await api.client.get(LOG, params=params), status=400, code="invalid_argument"
    )

    assert field in problem["detail"]


async def test_a_cursor_belongs_to_its_list(api: Api) -> None:
    job = await api.submit(1, webhook=HOOK)
    await failed(api, job, 2)
    cursor = (await api.client.get(LOG, params={"limit": 1})).json()["next_cursor"]

    for path, params in (
        (LOG, {"status": "failed"}),
        (LOG, {"since": "2020-01-01T00:00:00Z"}),
        (f"/v1/jobs/{job['job_id']}/webhook/deliveries", {}),
    ):
        answer = await api.client.get(path, params={**params, "cursor": cursor})
        problem_of(answer, status=400, code="invalid_argument")
    answer = await api.foreign.get(LOG, params={"cursor": cursor})
    problem_of(answer, status=400, code="invalid_argument")


async def test_a_delivery_shows_its_bytes_and_every_attempt(api: Api) -> None:
    job = await api.submit(1, webhook=HOOK)
    made = await api.deliver(job)
    sent = {"X-Signature": "t=1,v1=01234567…,kid=K"}
    first = await api.attempt(
        made, "http_5xx:503", status=503, content_type="text/html", length=9, headers=sent
    )
    api.clock.shift(5)
    now = api.clock.now()
    await api.binding.deliveries.change_delivery(
        first, begin_attempt(first, now=now, lapses_at=now + 1)
    )

    shown = (await api.client.get(f"{LOG}/{made.delivery_id}")).json()

    assert shown["body"].encode() == made.body
    assert (shown["status"], shown["attempt_count"], shown["ladder"]) == ("pending", 2, 1)
    assert "last_outcome" not in shown
    one, two = shown["attempts"]
    assert one == {
        "number": 1,
        "started_at": shown["created_at"],
        "milliseconds": 7,
        "outcome": "http_5xx:503",
        "host": "hooks.test",
        "status": 503,
        "content_type": "text/html",
        "length": 9,
        "next_attempt_at": shown["next_attempt_at"],
        "is_replay": False,
        "headers": sent,
    }
    assert two.keys() == {"number", "started_at", "milliseconds", "is_replay", "headers"}
    [row] = (await api.client.get(LOG)).json()["deliveries"]
    assert row == {name: value for name, value in shown.items() if name not in ("body", "attempts")}


@pytest.mark.guarantee("G15")
async def test_a_foreign_delivery_does_not_exist(api: Api) -> None:
    job = await api.submit(1, webhook=HOOK)
    made = await api.deliver(job)
    before = (await api.client.get(f"{LOG}/{made.delivery_id}")).content
    nobodys = api.clock.new_id()

    for method, rest in (("GET", ""), ("POST", "/replay"), ("POST", "/headers")):
        foreign = await api.foreign.request(method, f"{LOG}/{made.delivery_id}{rest}")
        missing = await api.client.request(method, f"{LOG}/{nobodys}{rest}")
        theirs = problem_of(foreign, status=404, code="not_found")
        assert theirs["detail"] == problem_of(missing, status=404, code="not_found")["detail"]
    answer = await api.foreign.get(f"/v1/jobs/{job['job_id']}/webhook/deliveries")
    problem_of(answer, status=404, code="not_found")
    window = {"status": "pending", "since": EPOCH}
    assert (await api.foreign.post(REPLAY, json=window)).json() == {"replayed": 0}
    assert (await api.client.get(f"{LOG}/{made.delivery_id}")).content == before


# -- replay --


async def test_a_replay_keeps_id_and_bytes_and_begins_a_ladder(api: Api) -> None:
    job = await api.submit(1, webhook=HOOK)
    good = await api.attempt(await api.deliver(job))
    api.clock.shift(60)

    answer = await api.client.post(f"{LOG}/{good.delivery_id}/replay")

    assert answer.status_code == 202
    row = answer.json()
    assert (row["status"], row["ladder"], row["attempt_count"]) == ("pending", 2, 1)
    assert row["replayed_at"] == row["next_attempt_at"] == rfc3339(api.clock.now())
    [again] = await api.binding.deliveries.due_deliveries(now=api.clock.now(), limit=10)
    assert (again.delivery_id, again.body) == (good.delivery_id, good.body)
    await api.attempt(again)
    shown = (await api.client.get(f"{LOG}/{good.delivery_id}")).json()
    assert [one["is_replay"] for one in shown["attempts"]] == [False, True]
    assert [one["number"] for one in shown["attempts"]] == [1, 2]


@pytest.mark.parametrize("state", ["pending", "failed", "dropped"])
async def test_a_delivery_in_any_state_is_replayed(api: Api, state: str) -> None:
    job = await api.submit(1, webhook=HOOK)
    if state == "failed":
        [made] = await failed(api, job, 1)
    else:
        made = (await api.deliver(job)).delivery_id
    if state == "dropped":
        await api.client.delete(f"/v1/jobs/{job['job_id']}/webhook")
        refused = await api.client.post(f"{LOG}/{made}/replay")
        problem_of(refused, status=409, code="conflict")
        await api.client.put(f"/v1/jobs/{job['job_id']}/webhook", json=HOOK)
    assert (await api.client.get(f"{LOG}/{made}")).json()["status"] == state

    assert (await api.client.post(f"{LOG}/{made}/replay")).json()["ladder"] == 2
    assert await due(api) == [made]


async def test_an_event_of_a_deleted_run_is_not_replayed(api: Api) -> None:
    job = await api.submit(1, webhook=HOOK)
    job_id, run_id = job["job_id"], job["latest_run"]["run_id"]
    good = await api.attempt(await api.deliver(job))
    await api.client.post(f"/v1/jobs/{job_id}/stop")
    await api.client.post(f"/v1/jobs/{job_id}/rerun")
    gone = await api.client.delete(f"/v1/jobs/{job_id}/runs/{run_id}")
    assert gone.status_code == 202, gone.text

    refused = await api.client.post(f"{LOG}/{good.delivery_id}/replay")

    assert "run" in problem_of(refused, status=409, code="conflict")["detail"]
    shown = (await api.client.get(f"{LOG}/{good.delivery_id}")).json()
    assert (shown["status"], shown["ladder"]) == ("delivered", 1)


async def test_an_event_that_the_webhook_no_longer_asks_for_is_not_replayed(api: Api) -> None:
    job = await api.submit(1, webhook=HOOK)
    good = await api.attempt(await api.deliver(job, event="run.completed"))
    hook, path = f"/v1/jobs/{job['job_id']}/webhook", f"{LOG}/{good.delivery_id}/replay"
    await api.client.put(hook, json={**HOOK, "events": ["run.failed"]})

    refused = problem_of(await api.client.post(path), status=409, code="conflict")
    await api.client.put(hook, json={**HOOK, "events": ["run.completed"]})

    assert "run.completed" in refused["detail"]
    assert (await api.client.post(path)).json()["ladder"] == 2


async def test_a_window_leaves_out_what_is_not_replayed_by_itself(api: Api) -> None:
    """Events of a deleted run, and those that the webhook does not ask for any more."""
    ended, narrowed = [await api.submit(1, webhook=HOOK) for _ in range(2)]
    good = await api.attempt(await api.deliver(ended))
    other = await api.attempt(await api.deliver(narrowed))
    wanted = await api.attempt(await api.deliver(narrowed, event="run.failed"))
    await api.client.post(f"/v1/jobs/{ended['job_id']}/stop")
    await api.client.post(f"/v1/jobs/{ended['job_id']}/rerun")
    run_path = f"/v1/jobs/{ended['job_id']}/runs/{ended['latest_run']['run_id']}"
    assert (await api.client.delete(run_path)).status_code == 202
    hook = {**HOOK, "events": ["run.failed"]}
    await api.client.put(f"/v1/jobs/{narrowed['job_id']}/webhook", json=hook)

    window = {"status": "delivered", "since": EPOCH}
    assert (await api.client.post(REPLAY, json=window)).json() == {"replayed": 1}
    assert await due(api) == [wanted.delivery_id]
    left = await logged(api, status="delivered")
    assert sorted(left) == sorted([good.delivery_id, other.delivery_id])


async def test_the_deliveries_of_a_deleted_job_are_gone(api: Api) -> None:
    job = await api.submit(1, webhook=HOOK)
    job_id = job["job_id"]
    made = await api.deliver(job)
    await api.client.post(f"/v1/jobs/{job_id}/stop")
    deleted = await api.client.delete(f"/v1/jobs/{job_id}")
    assert deleted.status_code == 202, deleted.text

    for method, path in (
        ("GET", f"{LOG}/{made.delivery_id}"),
        ("POST", f"{LOG}/{made.delivery_id}/headers"),
        ("POST", f"{LOG}/{made.delivery_id}/replay"),
        ("GET", f"/v1/jobs/{job_id}/webhook/deliveries"),
    ):
        problem_of(await api.client.request(method, path), status=404, code="not_found")


async def test_a_delivery_is_replayed_once_under_a_key(api: Api) -> None:
    job = await api.submit(1, webhook=HOOK)
    good = await api.attempt(await api.deliver(job))
    other = await api.attempt(await api.deliver(job, event="run.failed"))
    path, keyed = f"{LOG}/{good.delivery_id}/replay", {"Idempotency-Key": "again"}

    first = await api.client.post(path, headers=keyed)
    [waits] = await api.binding.deliveries.due_deliveries(now=api.clock.now(), limit=10)
    await api.attempt(waits)
    api.clock.shift(60)
    again = await api.client.post(path, headers=keyed)
    elsewhere = await api.client.post(f"{LOG}/{other.delivery_id}/replay", headers=keyed)
    bad = await api.client.post(path, headers={"Idempotency-Key": ""})

    assert (first.status_code, first.json()["ladder"]) == (202, 2)
    assert "Idempotency-Replayed" not in first.headers
    assert (again.status_code, again.content) == (202, first.content)
    assert again.headers["Idempotency-Replayed"] == "true"
    assert elsewhere.json()["ladder"] == 2
    problem_of(bad, status=400, code="invalid_argument")
    assert await due(api) == [other.delivery_id]


async def test_a_refused_replay_frees_its_key(api: Api) -> None:
    job = await api.submit(1, webhook=HOOK)
    made = await api.deliver(job)
    hook, keyed = f"/v1/jobs/{job['job_id']}/webhook", {"Idempotency-Key": "again"}
    await api.client.delete(hook)
    path = f"{LOG}/{made.delivery_id}/replay"
    problem_of(await api.client.post(path, headers=keyed), status=409, code="conflict")
    await api.client.put(hook, json=HOOK)

    assert (await api.client.post(path, headers=keyed)).status_code == 202


async def test_a_replay_whose_answer_was_lost_is_not_done_again(api: Api) -> None:
    """A process dies between the write and its answer; the repetition finds the delivery queued."""
    job = await api.submit(1, webhook=HOOK)
    good = await api.attempt(await api.deliver(job))
    request = f"{LOG}/{good.delivery_id}/replay"
    keyed = {"Idempotency-Key": "again"}

    async def dying(*_args: object, **_named: object) -> None:
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api.binding.idempotency, "answer_idempotency_key", dying)
        patch.setattr(api.binding.idempotency, "release_idempotency_key", forgotten)
        with pytest.raises(Killed):
            await api.client.post(request, headers=keyed)
    api.clock.shift(61)
    answer = await api.client.post(request, headers=keyed)

    assert (answer.status_code, answer.json()["ladder"]) == (202, 2)
    assert (await api.client.get(f"{LOG}/{good.delivery_id}")).json()["ladder"] == 2


async def test_replays_at_once_each_begin_a_ladder(api: Api) -> None:
    job = await api.submit(1, webhook=HOOK)
    made = await api.deliver(job)

    answers = await asyncio.gather(
        *(api.client.post(f"{LOG}/{made.delivery_id}/replay") for _ in range(4))
    )

    assert sorted(answer.json()["ladder"] for answer in answers) == [2, 3, 4, 5]


async def test_a_window_is_replayed_once_under_a_key(api: Api) -> None:
    job = await api.submit(1, webhook=HOOK)
    early = await failed(api, job, 1)
    since = rfc3339(api.clock.now())
    wanted = await failed(api, job, 120)
    until = rfc3339(api.clock.now())
    late = await failed(api, job, 1)
    good = await api.attempt(await api.deliver(job))
    window = {"status": "failed", "since": since, "until": until}
    keyed = {"Idempotency-Key": "again"}

    first = await api.client.post(REPLAY, json=window, headers=keyed)
    queued = await due(api)
    for one in await api.binding.deliveries.due_deliveries(now=api.clock.now(), limit=9):
        await api.attempt(await api.attempt(one, "timeout", status=410), "timeout", status=410)
    again = await api.client.post(REPLAY, json=window, headers=keyed)
    other = await api.client.post(REPLAY, json={**window, "status": "delivered"}, headers=keyed)

    assert (first.status_code, first.json()) == (202, {"replayed": 120})
    assert sorted(queued) == wanted
    assert not {*early, *late, good.delivery_id} & set(queued)
    assert again.content == first.content
    assert again.headers["Idempotency-Replayed"] == "true"
    problem_of(other, status=409, code="idempotency_key_conflict")
    assert len(await due(api)) == 120 - 9
    assert (await api.client.post(REPLAY, json=window)).json() == {"replayed": 9}


@pytest.mark.slow
async def test_a_replay_of_500_queues_500(api: Api) -> None:
    job = await api.submit(1, webhook=HOOK)
    wanted = await failed(api, job, 500)

    answers = [
        await api.client.post(REPLAY, json={"since": EPOCH}, headers={"Idempotency-Key": "k"})
        for _ in range(2)
    ]

    assert [answer.json() for answer in answers] == [{"replayed": 500}] * 2
    found = await api.binding.deliveries.due_deliveries(now=api.clock.now(), limit=2_000)
    assert sorted(one.delivery_id for one in found) == wanted
    assert {one.ladder for one in found} == {2}


@pytest.mark.slow
async def test_one_call_replays_the_newest_thousand(api: Api) -> None:
    job = await api.submit(1, webhook=HOOK)
    wanted = await failed(api, job, MOST_REPLAYED + 3)

    first = await api.client.post(REPLAY, json={"since": EPOCH})
    queued = await due(api)
    rest = await api.client.post(REPLAY, json={"since": EPOCH})

    assert (first.json(), rest.json()) == ({"replayed": MOST_REPLAYED}, {"replayed": 3})
    assert sorted(queued) == wanted[3:]


async def test_a_window_leaves_what_no_webhook_takes_as_it_is(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the replay of one is refused. Each job is looked up once in a page."""
    kept, bare, gone = [await api.submit(1, webhook=HOOK) for _ in range(3)]
    sent = [await api.attempt(await api.deliver(job)) for job in (bare, gone)]
    wanted: list[str] = []
    for _ in range(3):
        api.clock.shift(1)
        wanted.append((await api.attempt(await api.deliver(kept))).delivery_id)
    assert (await api.client.delete(f"/v1/jobs/{bare['job_id']}/webhook")).status_code == 204
    assert (await api.client.delete(f"/v1/jobs/{gone['job_id']}")).status_code == 202
    again = f"/v1/jobs/{kept['job_id']}/webhook"
    assert (await api.client.delete(again)).status_code == 204
    assert (await api.client.put(again, json={**HOOK, "signature": False})).status_code == 200
    find_job = api.binding.jobs.find_job
    asked: list[str] = []

    async def counted(job_id: str) -> Any:
        asked.append(job_id)
        return await find_job(job_id)

    monkeypatch.setattr(api.binding.jobs, "find_job", counted)
    window = {"since": EPOCH, "status": "delivered"}
    answers = [
        await api.client.post(REPLAY, json=window, headers={"Idempotency-Key": "k"})
        for _ in range(2)
    ]

    assert [answer.json() for answer in answers] == [{"replayed": 3}] * 2
    found = await api.binding.deliveries.due_deliveries(now=api.clock.now(), limit=9)
    assert sorted(one.delivery_id for one in found) == sorted(wanted)
    assert {one.webhook_number for one in found} == {1}
    assert sorted(asked) == sorted(job["job_id"] for job in (kept, bare, gone))
    for one in sent:
        assert await api.binding.deliveries.get_delivery(one.caller, one.delivery_id) == one
        refused = await api.client.post(f"{LOG}/{one.delivery_id}/replay")
        assert refused.status_code in (404, 409)


async def test_a_replay_that_died_is_gone_on_with_by_the_next(api: Api) -> None:
    """A process dies in the middle of a window; whoever repeats the request queues the others."""
    job = await api.submit(1, webhook=HOOK)
    wanted = await failed(api, job, 5)
    log = api.binding.deliveries
    change, changed = log.change_delivery, 0

    async def dying(before: Any, after: Any) -> bool:
        nonlocal changed
        changed += 1
        if changed == 3:
            raise Killed
        return await change(before, after)

    request = {"json": {"since": EPOCH}, "headers": {"Idempotency-Key": "k"}}
    release = api.binding.idempotency.release_idempotency_key
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log, "change_delivery", dying)
        patch.setattr(api.binding.idempotency, "release_idempotency_key", forgotten)
        with pytest.raises(Killed):
            await api.client.post(REPLAY, **request)  # type: ignore[arg-type]
    assert api.binding.idempotency.release_idempotency_key == release
    problem_of(
        await api.client.post(REPLAY, **request),  # type: ignore[arg-type]
        status=409,
        code="idempotency_key_conflict",
    )
    api.clock.shift(61)
    answer = await api.client.post(REPLAY, **request)  # type: ignore[arg-type]

    assert answer.json() == {"replayed": 5}
    found = await log.due_deliveries(now=api.clock.now(), limit=10)
    assert {one.delivery_id: one.ladder for one in found} == dict.fromkeys(wanted, 2)


class Killed(BaseException):
    """The process dies here."""


async def forgotten(*_args: object, **_named: object) -> None:
    """A dead process frees no key."""


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ([], "JSON object"),
        ({}, "since"),
        ({"since": None}, "since"),
        ({"since": 5}, "since"),
        ({"since": "2026-01-31T12:00:00"}, "since"),
        ({"since": EPOCH, "until": "tomorrow"}, "until"),
        ({"since": EPOCH, "until": []}, "until"),
        ({"since": EPOCH, "status": "lost"}, "status"),
        ({"since": EPOCH, "status": ["failed"]}, "status"),
    ],
)
async def test_what_a_replay_of_a_window_refuses(api: Api, document: object, field: str) -> None:
    await failed(api, await api.submit(1, webhook=HOOK), 1)

    problem = problem_of(
        await api.client.post(REPLAY, json=document), status=400, code="invalid_argument"
    )

    assert field in problem["detail"]
    assert await due(api) == []


# -- headers --


async def headers_of(api: Api, delivery_id: str) -> dict[str, str]:
    response = await api.client.post(f"{LOG}/{delivery_id}/headers")
    assert response.status_code == 200, response.text
    found: dict[str, str] = response.json()["headers"]
    return found


async def test_headers_are_signed_by_the_keys_as_they_stand(api: Api) -> None:
    keys = [(await api.client.post("/v1/hmac/keys/rotate")).json()]
    job = await api.submit(1, webhook={**HOOK, "signature": True})
    made = await api.attempt(await api.deliver(job), "timeout")

    first = await headers_of(api, made.delivery_id)
    keys.append((await api.client.post("/v1/hmac/keys/rotate")).json())
    api.clock.shift(10)
    second = await headers_of(api, made.delivery_id)
    await api.client.post("/v1/hmac/keys/rotate/finalize")
    third = await headers_of(api, made.delivery_id)

    assert first["X-ZenRows-Event-Id"] == first["webhook-id"] == made.delivery_id
    assert first["X-Conveyor-Attempt"] == "1"
    now = api.clock.now() / 1_000
    for headers, key in ((first, keys[0]), (second, keys[0]), (third, keys[1])):
        secrets = {key["kid"]: key["secret"]}
        assert verify_webhook_signature(made.body, headers["X-Signature"], secrets, now=now)
    for key in keys:
        assert verify(made.body, second, key["secret"], now=int(now))
        assert key["secret"] not in json.dumps([first, second, third])
    assert first["webhook-timestamp"] < second["webhook-timestamp"]
    await api.client.post(f"{LOG}/{made.delivery_id}/replay")
    assert (await headers_of(api, made.delivery_id))["X-Conveyor-Replay"] == "true"


async def test_headers_are_unsigned_where_the_webhook_is(api: Api) -> None:
    await api.client.post("/v1/hmac/keys/rotate")
    job = await api.submit(1, webhook=HOOK)
    made = await api.deliver(job)

    assert (await headers_of(api, made.delivery_id)).keys() == {
        "X-ZenRows-Event-Id",
        "X-Conveyor-Attempt",
    }
    await api.client.delete(f"/v1/jobs/{job['job_id']}/webhook")
    assert "X-Signature" in await headers_of(api, made.delivery_id)


async def test_headers_are_not_left_unsigned_where_the_key_cannot_be_opened(api: Api) -> None:
    await api.client.post("/v1/hmac/keys/rotate")
    job = await api.submit(1, webhook={**HOOK, "signature": True})
    made = await api.deliver(job)
    slots = await api.binding.signing_keys.get_signing_keys(made.caller)
    assert slots.active is not None
    foreign = msgspec.structs.replace(slots.active, kid=api.clock.new_id())
    await api.binding.signing_keys.add_signing_key(made.caller, foreign)

    refused = await api.client.post(f"{LOG}/{made.delivery_id}/headers")

    problem = problem_of(refused, status=503, code="unavailable")
    assert foreign.kid in problem["detail"]


# -- tests of receivers --


async def test_a_test_event_is_in_the_log_and_not_replayed(tmp_path: Path) -> None:
    receiver = Receiver()
    async with open_api(tmp_path) as api, raw_server(receiver.serve) as server:
        await api.client.post("/v1/hmac/keys/rotate")
        good = await outcome_of(api, url=server.url("/hook"), signature=True)
        receiver.status = 503
        bad = await outcome_of(api, url=server.url("/hook"))
        bare = [await logged_attempt(api, one.event_id) for one in (good, bad)]

        assert await logged(api) == [bad.event_id, good.event_id]
        assert await logged(api, status="failed") == [bad.event_id]
        assert [one["outcome"] for one in bare] == ["delivered", "http_5xx:503"]
        assert len(receiver.got) == 2
        shown = (await api.client.get(f"{LOG}/{good.event_id}")).json()
        headers, body = receiver.got[0]
        assert shown["body"].encode() == body
        assert (shown["job_id"], shown["run_id"], shown["event_type"]) == (
            "test",
            "test",
            "webhook.test",
        )
        assert "next_attempt_at" not in shown
        assert bare[0]["host"] == "127.0.0.1"
        kept = bare[0]["headers"]
        assert kept["X-ZenRows-Event-Id"] == headers["X-ZenRows-Event-Id"] == good.event_id
        timestamp, digest, kid = headers["X-Signature"].split(",")
        assert kept["X-Signature"] == f"{timestamp},{digest[:11]}…,{kid}"
        assert kept["webhook-signature"] == headers["webhook-signature"][:11] + "…"
        refused = await api.client.post(f"{LOG}/{bad.event_id}/replay")
        problem_of(refused, status=409, code="conflict")
        assert (await api.client.post(REPLAY, json={"since": EPOCH})).json() == {"replayed": 0}
        assert await due(api) == []
        later = api.clock.now() + 10**9
        assert await api.binding.deliveries.due_deliveries(now=later, limit=10) == []


async def logged_attempt(api: Api, delivery_id: str) -> dict[str, Any]:
    """The only attempt at a delivery."""
    [attempt] = (await api.client.get(f"{LOG}/{delivery_id}")).json()["attempts"]
    found: dict[str, Any] = attempt
    return found


async def test_a_test_is_in_the_log_before_it_is_sent(tmp_path: Path) -> None:
    receiver = Receiver()
    receiver.may_answer.clear()
    async with open_api(tmp_path) as api, raw_server(receiver.serve) as server:
        testing = asyncio.ensure_future(api.client.post(TEST, json={"url": server.url()}))
        await receiver.gets(1)
        [row] = (await api.client.get(LOG)).json()["deliveries"]
        receiver.may_answer.set()
        outcome: httpx.Response = await testing

        assert (row["status"], row["attempt_count"]) == (DeliveryStatus.FAILED, 1)
        assert "last_outcome" not in row
        assert outcome.json()["event_id"] == row["delivery_id"]
        [row] = (await api.client.get(LOG)).json()["deliveries"]
        assert (row["status"], row["last_outcome"]) == ("delivered", "delivered")
