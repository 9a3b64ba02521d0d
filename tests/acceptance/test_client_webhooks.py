"""The public client sets webhooks, tests receivers and rotates keys; it can read every event."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from zenrows.batch import ZenRowsBatchClient, verify_webhook_signature
from zenrows.batch._resources import JobRef
from zenrows.batch._typed_dicts import WebhookDict
from zenrows.batch.errors import BatchErrorCode as Code
from zenrows.batch.models import (
    HMACKeyCreated,
    RunStatus,
    WebhookConfig,
    WebhookEvent,
    WebhookEventType,
)

from conveyor.signatures import verify
from tests.acceptance.support_bindings import Serving
from tests.acceptance.support_boot import Booted, boot
from tests.acceptance.support_calls import Caller, Json
from tests.acceptance.support_client import (
    NOWHERE,
    finish,
    open_client,
    pages,
    refused,
)
from tests.acceptance.support_receiver import Receiver
from tests.acceptance.support_wire import eventually

HOOK = "https://93.184.216.34/hook"
"""A receiver that is never asked: no run with it ends."""
DELIVERIES = "/webhook/deliveries"


@pytest.fixture(scope="module")
def client(server: Serving) -> Iterator[ZenRowsBatchClient]:
    with open_client(server, "key-of-the-listener") as client:
        yield client


def shown(config: WebhookConfig | None) -> tuple[str, bool] | None:
    return None if config is None else (str(config.url), config.signature)


def test_a_job_has_the_webhook_that_it_was_given(client: ZenRowsBatchClient) -> None:
    job = client.submit_open(webhook=WebhookDict(url=HOOK))
    assert job.submit_response is not None
    assert shown(job.submit_response.webhook) == (HOOK, False)
    assert shown(job.load().data.webhook) == (HOOK, False)
    assert shown(job.get_webhook()) == (HOOK, False)
    client.rotate_hmac_key()
    other = f"{HOOK}/other"
    assert shown(job.set_webhook(other, signature=True)) == (other, True)
    assert shown(client.get_job_webhook(job.job_id)) == (other, True)
    assert [shown(one.webhook) for one in client.list_jobs().jobs] == [(other, True)]
    for _ in range(2):
        job.delete_webhook()
    refused(Code.NOT_FOUND, 404, job.get_webhook)
    assert job.load().data.webhook is None
    job.delete()


def test_what_is_refused_has_the_published_code(server: Serving) -> None:
    with open_client(server, "key-of-nobody-who-signs") as client:
        job = client.submit_open()
        for url, signature, code in (
            (HOOK, True, Code.WEBHOOK_SIGNING_REQUIRES_ACTIVE_KEY),
            ("ftp://93.184.216.34/", False, Code.CALLBACK_URL_MUST_BE_HTTPS),
            ("https://10.0.0.1/", False, Code.CALLBACK_URL_UNRESOLVABLE),
            ("https://user:word@93.184.216.34/", False, Code.INVALID_ARGUMENT),
        ):
            hook = WebhookDict(url=url, signature=signature)
            refused(code, 400, partial(client.submit_open, webhook=hook))
            refused(code, 400, partial(client.put_job_webhook, job.job_id, hook))
            refused(code, 400, partial(client.test_webhook, hook))
        missing = client.job(NOWHERE)
        refused(Code.NOT_FOUND, 404, missing.get_webhook)
        refused(Code.NOT_FOUND, 404, lambda: missing.set_webhook(HOOK, signature=False))
        refused(Code.NOT_FOUND, 404, missing.delete_webhook)
        assert [one.job_id for one in client.iter_jobs()] == [job.job_id]
        job.delete()


# -- events, of a development server, which may post to this machine --


@pytest.fixture(scope="module")
def booted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Booted]:
    with boot(
        tmp_path_factory.mktemp("events"),
        *("--gateway", "fake", "--log-level", "debug"),
        retry_base=0.01,
        outbox_interval=0.1,
    ) as server:
        yield server


def log(server: Booted, key: str, count: int, **params: str) -> list[Json]:
    """The deliveries of a caller, newest first, once none of `count` is pending."""

    def settled() -> list[Json] | None:
        with Caller(server.api, key=key) as caller:
            found: list[Json] = caller.get(DELIVERIES, **params)["deliveries"]
        waits = [one for one in found if one["status"] == "pending" or "last_outcome" not in one]
        return found if len(found) == count and not waits else None

    return eventually(settled, f"{count} deliveries end")


def run_job(client: ZenRowsBatchClient, receiver: Receiver, *, signature: bool) -> JobRef:
    job = client.submit_regular(
        pages(2, "event"),
        webhook=WebhookDict(url=receiver.url, signature=signature),
        external_id="order.7",
        metadata={"team": "blue ☃"},
    )
    finish(job)
    return job


@pytest.mark.development_only("its receivers are on loopback")
def test_the_end_of_each_run_is_told_once(booted: Booted) -> None:
    key = "key-of-the-told"
    with open_client(booted, key) as client, Receiver(200) as receiver:
        hook = WebhookDict(url=receiver.url)
        stopped = client.submit_regular(pages(1, "slow", delay=60), webhook=hook)
        stopped.run.stop()
        assert stopped.run.load().status is RunStatus.STOPPED
        job = run_job(client, receiver, signature=False)
        receiver.gets(1)
        job.rerun()
        finish(job)
        receiver.gets(2)
        rows = log(booted, key, 2)
        details = [detail(booted, key, row["delivery_id"]) for row in reversed(rows)]
        status = caller_job(booted, key, job)["webhook_status"]

    assert len(receiver.got) == 2
    for number, ((headers, body), told) in enumerate(zip(receiver.got, details, strict=True)):
        event = WebhookEvent.model_validate_json(body)
        assert event.event_type is WebhookEventType.RUN_COMPLETED
        assert (event.job_id, event.run_sequence) == (job.job_id, number + 1)
        assert (event.external_id, event.metadata) == ("order.7", {"team": "blue ☃"})
        assert event.stats is not None
        assert (event.stats.total, event.stats.successful) == (2, 2)
        assert headers["X-ZenRows-Event-Id"] == event.event_id == told["delivery_id"]
        assert "X-Signature" not in headers
        assert told["body"].encode() == body
        [attempt] = told["attempts"]
        assert attempt["headers"].items() <= headers.items()
        assert (attempt["outcome"], attempt["status"]) == ("delivered", 200)
    assert status.keys() == {"last_outcome", "last_attempt_at"}
    assert status["last_outcome"] == "delivered"


def detail(server: Booted, key: str, delivery_id: str) -> Json:
    with Caller(server.api, key=key) as caller:
        found: Json = caller.get(f"{DELIVERIES}/{delivery_id}")
        return found


def caller_job(server: Booted, key: str, job: JobRef) -> Json:
    with Caller(server.api, key=key) as caller:
        found: Json = caller.get(f"/jobs/{job.job_id}")
        return found


@pytest.mark.development_only("its receivers are on loopback")
def test_as_many_attempts_are_logged_as_requests_came(booted: Booted) -> None:
    key = "key-of-the-counted"
    with open_client(booted, key) as client, Receiver(404) as receiver:
        job = run_job(client, receiver, signature=False)
        client.test_webhook(WebhookDict(url=receiver.url))
        receiver.gets(2)
        [test, event] = sorted(log_of(booted, key, 2), key=lambda one: one["event_type"])[::-1]
        assert (test["event_type"], test["status"]) == ("webhook.test", "failed")
        receiver.status = 200
        with Caller(booted.api, key=key) as caller:
            answer = caller.http.post(f"{DELIVERIES}/{event['delivery_id']}/replay")
            assert (answer.status_code, answer.json()["ladder"]) == (202, 2)
            refused_test = caller.http.post(f"{DELIVERIES}/{test['delivery_id']}/replay")
            assert refused_test.status_code == 409
        receiver.gets(3)
        rows = log(booted, key, 2)
        job.delete_webhook()

    attempts = [
        attempt
        for row in rows
        for attempt in detail(booted, key, row["delivery_id"])["attempts"]
        if attempt["outcome"]
    ]
    assert len(attempts) == len(receiver.got) == 3
    of_run = [one for one in receiver.got if one[0]["X-ZenRows-Event-Id"] == event["delivery_id"]]
    first, second = of_run
    assert first[1] == second[1]
    assert "X-Conveyor-Replay" not in first[0]
    assert second[0]["X-Conveyor-Replay"] == "true"
    assert (first[0]["X-Conveyor-Attempt"], second[0]["X-Conveyor-Attempt"]) == ("1", "2")


def log_of(server: Booted, key: str, count: int) -> list[Json]:
    """The deliveries of a caller, once each of `count` had an attempt."""

    def tried() -> list[Json] | None:
        with Caller(server.api, key=key) as caller:
            found: list[Json] = caller.get(DELIVERIES)["deliveries"]
        return found if sum("last_outcome" in one for one in found) == count else None

    return eventually(tried, f"{count} deliveries have an attempt")


Event = tuple[Mapping[str, str], bytes]


def kid_of(event: Event) -> str:
    return event[0]["X-Signature"].rpartition("kid=")[2]


def verifies(event: Event, *keys: HMACKeyCreated) -> bool:
    """Tell whether a receiver with these keys takes an event, by one of the two schemes."""
    headers, body = event
    by_client = verify_webhook_signature(
        body, headers["X-Signature"], {key.kid: key.secret for key in keys}
    )
    ours = verify(body, headers, [key.secret for key in keys])
    assert ours or not by_client
    return ours


@pytest.mark.slow
@pytest.mark.guarantee("G16")
@pytest.mark.development_only("its receivers are on loopback")
def test_no_event_fails_at_any_moment_of_a_rotation(tmp_path: Path) -> None:
    with (
        boot(
            tmp_path, *("--gateway", "fake", "--log-level", "debug"), outbox_interval=0.1
        ) as server,
        open_client(server) as client,
        Receiver(200) as receiver,
    ):

        def delivered() -> Event:
            count = len(receiver.got)
            run_job(client, receiver, signature=True)
            receiver.gets(count + 1)
            return receiver.got[-1]

        first = client.rotate_hmac_key()
        alone = delivered()
        second = client.rotate_hmac_key()
        during = delivered()
        client.cancel_hmac_rotation()
        cancelled = delivered()
        third = client.rotate_hmac_key()
        again = delivered()
        client.finalize_hmac_key()
        after = delivered()
        answers = shown_later(client, server)

    assert [kid_of(one) for one in (alone, during, cancelled, again)] == [first.kid] * 4
    assert kid_of(after) == third.kid
    for event, candidate in ((during, second), (again, third)):
        for known in ([first], [candidate], [first, candidate]):
            assert verifies(event, *known)
    assert verifies(cancelled, first)
    assert not verifies(cancelled, second)
    assert verifies(after, third)
    assert not verifies(after, first)
    for key in (first, second, third):
        raw = base64.b64decode(key.secret)
        places = {"answers": answers, "output": server.output()}
        places |= {str(file): file.read_bytes() for file in server.files()}
        for name, content in places.items():
            for spelling in (key.secret.encode(), raw, raw.hex().encode()):
                assert spelling not in content, f"the secret of a key is in {name}"
        assert key.secret not in repr(places)


def shown_later(client: ZenRowsBatchClient, server: Booted) -> bytes:
    """Answers after a rotation, in which no secret may be."""
    with Caller(server.api) as caller:
        rows: list[dict[str, Any]] = caller.get(DELIVERIES)["deliveries"]
        parts = [caller.http.get("/hmac/keys").content, caller.http.get(DELIVERIES).content]
        for row in rows:
            path = f"{DELIVERIES}/{row['delivery_id']}"
            parts += [caller.http.get(path).content, caller.http.post(f"{path}/headers").content]
    client.list_hmac_keys()
    return b"".join(parts)
