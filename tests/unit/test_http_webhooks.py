"""The webhook of a job over the API: submitted, shown, changed, removed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from zenrows.batch import models

from conveyor.domain.deliveries import DeliveryStatus
from conveyor.domain.webhooks import EventType, Webhook
from conveyor.gateway.webhook import WebhookRules
from tests.unit.http_api import KEY, Api, open_api, problem_of
from tests.unit.large_api import staged_files
from tests.unit.test_ssrf_matrix import LITERALS, RESOLVED, always
from tests.unit.test_webhook_sender import canary

HOOK = {"url": "https://hooks.test/in?a=b", "signature": False}
USUAL = ["run.completed", "run.failed"]
TASKS = [{"url": "https://site.test/"}]
PUBLIC = always("93.184.216.34")


@pytest.fixture
def anyio_backend() -> str:
    """The store runs on asyncio."""
    return "asyncio"


async def job_of(api: Api, job_id: str) -> dict[str, Any]:
    shown = (await api.client.get(f"/v1/jobs/{job_id}")).json()
    models.Job.model_validate(shown)
    answer: dict[str, Any] = shown
    return answer


async def entries(api: Api) -> int:
    """The number of runs whose end is owed to somebody."""
    later = api.clock.now() + 3_600_000
    return len(await api.binding.outbox.due_entries(now=later, limit=10))


async def test_a_job_is_submitted_with_its_webhook(tmp_path: Path) -> None:
    async with open_api(tmp_path, lookup=PUBLIC) as api:
        response = await api.client.post("/v1/jobs", json={"tasks": TASKS, "webhook": HOOK})
        submitted = models.SubmitJobResponse.model_validate(response.json())
        shown = await job_of(api, submitted.job_id)
        got = await api.client.get(f"/v1/jobs/{submitted.job_id}/webhook")
        listed = (await api.client.get("/v1/jobs")).json()["jobs"]
        owed = await entries(api)

    expected = {**HOOK, "events": USUAL}
    assert response.json()["webhook"] == shown["webhook"] == got.json() == expected
    assert listed[0]["webhook"] == expected
    assert models.WebhookConfig.model_validate(got.json()).signature is False
    assert "webhook_status" not in shown
    assert owed == 1


async def test_a_repeated_submit_gets_the_same_webhook(tmp_path: Path) -> None:
    async with open_api(tmp_path, lookup=PUBLIC) as api:
        answers = [
            await api.client.post(
                "/v1/jobs",
                json={"tasks": TASKS, "webhook": HOOK},
                headers={"Idempotency-Key": "once"},
            )
            for _ in range(2)
        ]

    assert answers[0].content == answers[1].content
    assert answers[1].headers["Idempotency-Replayed"] == "true"


async def test_a_large_document_may_have_a_webhook(tmp_path: Path) -> None:
    tasks = [{"url": f"https://site.test/{number}?" + "x" * 200} for number in range(2_000)]
    async with open_api(tmp_path, lookup=PUBLIC, async_threshold=1_000) as api:
        webhook = {**HOOK, "events": ["run.stopped"]}
        made = await api.client.post("/v1/jobs", json={"tasks": tasks, "webhook": webhook})
        key = await api.client.post("/v1/jobs", json={"tasks": tasks, "webhook": signed()})
        jobs = (await api.client.get("/v1/jobs")).json()["jobs"]

        assert made.status_code == 202, made.text
        assert made.json()["webhook"] == webhook
        problem = problem_of(key, status=400, code="webhook_signing_requires_active_key")
        assert problem["detail"].startswith("webhook.signature: ")
        assert [job["job_id"] for job in jobs] == [made.json()["job_id"]]
        assert {file.parts[-3] for file in staged_files(api)} == {made.json()["job_id"]}


def signed() -> dict[str, Any]:
    return {**HOOK, "signature": True}


async def test_a_put_replaces_all_but_the_events_that_it_does_not_name(tmp_path: Path) -> None:
    async with open_api(tmp_path, lookup=PUBLIC) as api:
        job = await api.submit(1)
        path = f"/v1/jobs/{job['job_id']}/webhook"
        problem_of(await api.client.get(path), status=404, code="not_found")
        assert await entries(api) == 0

        answers = []
        for more in ({}, {"events": ["run.stopped", "run.failed"]}, {}, {"events": None}):
            answer = await api.client.put(path, json={**HOOK, **more})
            assert (await api.client.get(path)).content == answer.content
            answers.append(answer.json()["events"])

        assert answers == [
            USUAL,
            ["run.failed", "run.stopped"],
            ["run.failed", "run.stopped"],
            USUAL,
        ]
        assert (await job_of(api, job["job_id"]))["webhook"] == {**HOOK, "events": USUAL}
        assert await entries(api) == 1


async def test_a_run_that_ended_before_its_webhook_was_set_owes_nothing(tmp_path: Path) -> None:
    async with open_api(tmp_path, lookup=PUBLIC) as api:
        job = await api.submit(1)
        await api.drain(job)

        assert (await api.client.put(f"/v1/jobs/{job['job_id']}/webhook", json=HOOK)).is_success
        assert await entries(api) == 0


@pytest.mark.parametrize(
    ("document", "code", "field"),
    [
        ({}, "invalid_argument", "signature"),
        ({"url": HOOK["url"]}, "invalid_argument", "signature"),
        ({"signature": True}, "invalid_argument", "url"),
        ({**HOOK, "signature": None}, "invalid_argument", "signature"),
        ({**HOOK, "events": ["webhook.test"]}, "invalid_argument", "events"),
        ({**HOOK, "url": "https://u:p@hooks.test/"}, "invalid_argument", "url"),
        ({**HOOK, "url": "https://hooks.test/#x"}, "invalid_argument", "url"),
        ({**HOOK, "url": "http://hooks.test/"}, "callback_url_must_be_https", "url"),
        ({**HOOK, "url": "hooks.test"}, "callback_url_must_be_https", "url"),
        ({**HOOK, "url": "https://10.0.0.1/"}, "callback_url_unresolvable", "url"),
        ({**HOOK, "signature": True}, "webhook_signing_requires_active_key", "signature"),
    ],
)
async def test_what_a_put_refuses_changes_nothing(
    tmp_path: Path, document: dict[str, Any], code: str, field: str
) -> None:
    async with open_api(tmp_path, lookup=PUBLIC, rules=WebhookRules()) as api:
        job = await api.submit(1, webhook=HOOK)
        path = f"/v1/jobs/{job['job_id']}/webhook"
        before = (await api.client.get(path)).content

        problem = problem_of(await api.client.put(path, json=document), status=400, code=code)

        assert problem["detail"].startswith(f"{field}: ")
        assert (await api.client.get(path)).content == before


async def test_what_is_no_document_is_refused(tmp_path: Path) -> None:
    async with open_api(tmp_path, lookup=PUBLIC) as api:
        path = f"/v1/jobs/{(await api.submit(1))['job_id']}/webhook"
        for body, status, code in (
            (b"[]", 400, "invalid_argument"),
            (b"{", 400, "invalid_argument"),
            (b'{"x": "%s"}' % (b"x" * 70_000), 413, "payload_too_large"),
        ):
            headers = {"Content-Type": "application/json"}
            answer = await api.client.put(path, content=body, headers=headers)
            problem_of(answer, status=status, code=code)
        problem_of(await api.client.put(path), status=415, code="unsupported_media_type")


async def test_a_signature_needs_a_key_at_each_place(tmp_path: Path) -> None:
    async with open_api(tmp_path, lookup=PUBLIC) as api:
        path = f"/v1/jobs/{(await api.submit(1))['job_id']}/webhook"
        submit = {"tasks": TASKS, "webhook": signed()}
        for answer in (
            await api.client.post("/v1/jobs", json=submit),
            await api.client.put(path, json=signed()),
        ):
            problem_of(answer, status=400, code="webhook_signing_requires_active_key")
        await api.foreign.post("/v1/hmac/keys/rotate")
        refused = await api.client.put(path, json=signed())
        problem_of(refused, status=400, code="webhook_signing_requires_active_key")
        assert len((await api.client.get("/v1/jobs")).json()["jobs"]) == 1

        await api.client.post("/v1/hmac/keys/rotate")
        assert (await api.client.put(path, json=signed())).json()["signature"] is True
        assert (await api.client.post("/v1/jobs", json=submit)).status_code == 201


async def test_a_removed_webhook_owes_nothing(tmp_path: Path) -> None:
    async with open_api(tmp_path, lookup=PUBLIC) as api:
        job = await api.submit(1, webhook=HOOK)
        other = await api.submit(1, webhook=HOOK)
        path = f"/v1/jobs/{job['job_id']}/webhook"
        owed = await api.deliver(job)
        made = await api.attempt(await api.deliver(job, event="run.failed"))
        others = await api.deliver(other)

        answers = [await api.client.delete(path) for _ in range(2)]

        assert [answer.status_code for answer in answers] == [204, 204]
        problem_of(await api.client.get(path), status=404, code="not_found")
        assert "webhook" not in await job_of(api, job["job_id"])
        found = [
            await api.binding.deliveries.get_delivery(one.caller, one.delivery_id)
            for one in (owed, made, others)
        ]
        assert [one.status for one in found if one is not None] == [
            DeliveryStatus.DROPPED,
            DeliveryStatus.DELIVERED,
            DeliveryStatus.PENDING,
        ]
        due = await api.binding.deliveries.due_deliveries(now=api.clock.now(), limit=10)
        assert [one.delivery_id for one in due] == [others.delivery_id]


@pytest.mark.parametrize("what", ["/webhook", ""])
async def test_all_that_is_owed_is_dropped_page_by_page(tmp_path: Path, what: str) -> None:
    """With the webhook, and with the job."""
    async with open_api(tmp_path, lookup=PUBLIC) as api:
        job = await api.submit(1, webhook=HOOK)
        for _ in range(205):
            await api.deliver(job)
            api.clock.shift(0.001)

        assert (await api.client.delete(f"/v1/jobs/{job['job_id']}{what}")).is_success
        later = api.clock.now() + 3_600_000
        assert await api.binding.deliveries.due_deliveries(now=later, limit=10) == []
        log = (await api.client.get("/v1/webhook/deliveries", params={"limit": 100})).json()
        assert {row["status"] for row in log["deliveries"]} == {"dropped"}
        assert not any("next_attempt_at" in row for row in log["deliveries"])


async def test_the_status_tells_how_the_receiver_does(tmp_path: Path) -> None:
    async with open_api(tmp_path, lookup=PUBLIC) as api:
        job = await api.submit(1, webhook=HOOK)

        async def status() -> dict[str, Any]:
            found: dict[str, Any] = (await job_of(api, job["job_id"]))["webhook_status"]
            return found

        first = await api.deliver(job)
        assert set(await status()) == {"next_attempt_at"}
        await api.attempt(first)
        assert (await status()).keys() == {"last_outcome", "last_attempt_at"}
        assert (await status())["last_outcome"] == "delivered"
        api.clock.shift(60)
        failing = await api.attempt(
            await api.deliver(job, event="run.failed"), "http_5xx:503", status=503
        )
        since = (await status())["failing_since"]
        api.clock.shift(60)
        await api.attempt(failing, "timeout")
        told = await status()

        assert since == told["failing_since"] < told["last_attempt_at"] < told["next_attempt_at"]
        assert told["last_outcome"] == "timeout"
        await api.client.delete(f"/v1/jobs/{job['job_id']}/webhook")
        assert "webhook_status" not in await job_of(api, job["job_id"])


async def test_many_puts_at_once_leave_one_of_them(tmp_path: Path) -> None:
    async with open_api(tmp_path, lookup=PUBLIC) as api:
        job = await api.submit(1)
        path = f"/v1/jobs/{job['job_id']}/webhook"

        async def put(number: int) -> httpx.Response:
            return await api.client.put(path, json={**HOOK, "url": f"https://h{number}.test/"})

        answers = await asyncio.gather(*map(put, range(20)))

        assert {answer.status_code for answer in answers} == {200}
        assert (await api.client.get(path)).content in [answer.content for answer in answers]
        assert await entries(api) == 1


@pytest.mark.guarantee("G17")
@pytest.mark.slow
async def test_no_webhook_leads_to_an_address_that_is_not_public(tmp_path: Path) -> None:
    addresses = ["127.0.0.1"]

    async def lookup(host: str, port: int) -> list[str]:
        return addresses

    spellings = [(host, "127.0.0.1") for host in LITERALS]
    spellings += [("hooks.test", address) for address in RESOLVED]
    assert len(spellings) >= 60
    async with (
        canary() as (port, connections),
        open_api(tmp_path, lookup=lookup, rules=WebhookRules()) as api,
    ):
        path = f"/v1/jobs/{(await api.submit(1))['job_id']}/webhook"
        for host, address in spellings:
            addresses[:] = [address]
            webhook = {"url": f"https://{host}:{port}/", "signature": False}
            for answer in (
                await api.client.post("/v1/jobs", json={"tasks": TASKS, "webhook": webhook}),
                await api.client.put(path, json=webhook),
                await api.client.post("/v1/webhook/test", json=webhook),
            ):
                assert answer.status_code == 400, (webhook, answer.text)
                assert answer.json()["code"] in (
                    "callback_url_unresolvable",
                    "callback_url_must_be_https",
                    "invalid_argument",
                )
        assert len((await api.client.get("/v1/jobs")).json()["jobs"]) == 1
        log = await api.client.get("/v1/webhook/deliveries")
        assert log.json() == {"deliveries": []}
    assert connections == []


@pytest.mark.parametrize(
    "url",
    [
        "https://hooks.test",
        "HTTPS://HOOKS.test:8443/a%20b?c=d%23",
        "https://xn--bcher-kva.test/",
        "https://bücher.test/ü?q=ü",
        "https://[2606:4700::1111]/",
        "https://hooks.test/<>|^`{}\\",
    ],
)
async def test_a_url_is_shown_as_it_was_sent(tmp_path: Path, url: str) -> None:
    async with open_api(tmp_path, lookup=PUBLIC) as api:
        job = await api.submit(1, webhook={"url": url})
        shown = await api.client.get(f"/v1/jobs/{job['job_id']}/webhook")
        stored = await api.binding.jobs.find_job(job["job_id"])

    assert shown.json()["url"] == url
    models.WebhookConfig.model_validate(json.loads(shown.content))
    assert stored is not None
    assert stored.webhook == Webhook(url, False, (EventType.COMPLETED, EventType.FAILED))
    assert stored.caller != KEY
