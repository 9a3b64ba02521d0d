"""The commands about signing keys, receivers, webhooks of jobs, and the log of deliveries."""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from standardwebhooks import Webhook
from zenrows.batch import verify_webhook_signature
from zenrows.batch.models import WebhookEvent

from conveyor.signatures import verify
from conveyor.testing.local_server import ConveyorServer, conveyor_server
from tests.acceptance.support_cli import CLIENT, Ran, conveyor, in_shell
from tests.acceptance.support_receiver import Receiver
from tests.acceptance.support_wire import eventually

pytestmark = [pytest.mark.server, pytest.mark.slow]


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConveyorServer]:
    with conveyor_server(tmp_path_factory.mktemp("data")) as booted:
        yield booted


def test_a_secret_is_alone_on_standard_output(server: ConveyorServer) -> None:
    none = conveyor(server, "keys", "list")
    assert (none.code, none.out) == (0, [])
    assert none.err == ["no signing key yet: conveyor keys rotate"]

    first, second = conveyor(server, "keys", "rotate"), conveyor(server, "keys", "rotate", "--json")
    third = conveyor(server, "keys", "rotate")

    assert (first.code, len(base64.b64decode(first.out[0])), len(first.out)) == (0, 32, 1)
    assert set(json.loads(second.out[0])) == {"kid", "secret", "created_at"}
    assert (third.code, third.out, len(third.err)) == (1, [], 1)
    listed = conveyor(server, "keys", "list")
    assert [line.split()[0] for line in listed.out] == ["active", "candidate"]
    assert first.out[0] not in str(listed)


def test_a_rotation_is_cancelled_and_finalized(server: ConveyorServer) -> None:
    for _ in range(2):
        conveyor(server, "keys", "rotate")
    candidate = json.loads(conveyor(server, "keys", "list", "--json").out[0])["candidate"]["kid"]
    cancelled, again = conveyor(server, "keys", "cancel"), conveyor(server, "keys", "cancel")
    assert (cancelled.code, again.code) == (0, 0)
    assert cancelled.out == [f"key {candidate} is gone; the rotation is cancelled"]
    assert again.out == ["no rotation was under way: nothing to cancel"]
    last = conveyor(server, "keys", "cancel", "--json")
    assert json.loads(last.out[0]) == {"candidate": None, "removed_kid": None}
    nothing = conveyor(server, "keys", "finalize")
    assert (nothing.code, len(nothing.err)) == (1, 1)

    made = json.loads(conveyor(server, "keys", "rotate", "--json").out[0])
    finalized = json.loads(conveyor(server, "keys", "finalize", "--json").out[0])

    assert finalized["active_kid"] == made["kid"]
    keys = json.loads(conveyor(server, "keys", "list", "--json").out[0])
    assert (keys["active"]["kid"], keys["candidate"]) == (made["kid"], None)


@pytest.mark.parametrize("words", ["", pytest.param("--json", marks=pytest.mark.extended)])
def test_a_secret_that_cannot_be_written_is_told_with_the_way_back(
    server: ConveyorServer, words: str
) -> None:
    def rotate(redirection: str) -> tuple[int, list[str]]:
        return in_shell(server, redirection, "keys", "rotate", *words.split())

    why = "the secret is shown once, and standard output keeps nothing of it"
    for nowhere in (">&-", ">/dev/null"):
        assert rotate(nowhere) == (1, [f"conveyor: {why}"])
    assert conveyor(server, "keys", "list").out == []

    told = []
    for _ in range(2):
        code, lines = rotate(">/dev/full")
        assert (code, len(lines)) == (1, 1)
        told += lines
    kids = [line.split()[1] for line in conveyor(server, "keys", "list").out]
    lost = "is made, but its secret could not be written (No space left on device)"
    assert told == [
        f"conveyor: key {kids[0]} {lost}: conveyor keys rotate, then conveyor keys finalize",
        f"conveyor: key {kids[1]} {lost}: conveyor keys cancel, then conveyor keys rotate",
    ]


def test_a_receiver_is_tested(server: ConveyorServer) -> None:
    secret = conveyor(server, "keys", "rotate").out[0]
    with Receiver(204) as receiver:
        ran: Ran = conveyor(server, "webhook", "test", receiver.url, "--sign")
    headers, body = receiver.got[0]

    assert (ran.code, ran.out[0].split(" (")[0]) == (0, "delivered")
    assert verify(body, headers, secret)

    with Receiver(500) as broken:
        failed = conveyor(server, "webhook", "test", broken.url)
        told = conveyor(server, "webhook", "test", broken.url, "--json")
    assert (failed.code, failed.out[0].split(" (")[0]) == (1, "not delivered: http_5xx:500")
    assert json.loads(told.out[0])["status_code"] == 500
    refused = conveyor(server, "webhook", "test", "https://10.0.0.1/")
    assert (refused.code, refused.out, len(refused.err)) == (1, [], 1)


HOOK = "https://hooks.example.com/x"


def page_job(server: ConveyorServer, *words: str) -> str:
    ran = conveyor(server, "submit", server.url("page"), "--watch", *words)
    assert ran.code == 0, ran.err
    return ran.job_id


def ended(server: ConveyorServer, count: int) -> list[dict[str, Any]]:
    """The log, newest first, once so many events have been delivered or given up."""

    def look() -> list[dict[str, Any]] | None:
        log = [json.loads(line) for line in conveyor(server, "webhook", "log", "--json").out]
        return log if sum(one["status"] != "pending" for one in log) >= count else None

    return eventually(look, f"{count} events that have ended")


def test_a_webhook_is_set_shown_and_removed(server: ConveyorServer) -> None:
    job = page_job(server)
    none = conveyor(server, "webhook", "show", job)
    before = conveyor(server, "webhook", "log", "01M8MEDFTG")
    without = conveyor(server, "webhook", "replay", "last")
    unsigned = conveyor(server, "webhook", "set", job, HOOK, "--sign")
    conveyor(server, "keys", "rotate")
    words = ["--sign", "--event", "run.stopped", "--event", "run.completed"]
    made = conveyor(server, "webhook", "set", job, HOOK, *words)
    kept = conveyor(server, "webhook", "set", job, f"{HOOK}/2", "--json")
    shown = conveyor(server, "webhook", "show", job)
    removed = conveyor(server, "webhook", "rm", job)

    assert (before.code, before.err) == (1, ["conveyor: no such delivery: 01M8MEDFTG"])
    no_events = "conveyor: no events yet: they are those of jobs that have a webhook"
    assert (without.code, without.err) == (1, [no_events])
    assert (none.code, none.out, none.err) == (0, [], [f"job {job} has no webhook"])
    assert (unsigned.code, unsigned.out, len(unsigned.err)) == (1, [], 1)
    assert "make a signing key first" in unsigned.err[0]
    assert made.out == [f"job {job}: {HOOK}, signed, run.completed, run.stopped"]
    assert json.loads(kept.out[0])["webhook"] == {
        "url": f"{HOOK}/2",
        "signature": False,
        "events": ["run.completed", "run.stopped"],
    }
    assert shown.out[0] == f"job {job}: {HOOK}/2, not signed, run.completed, run.stopped"
    assert (removed.code, removed.out) == (0, [f"job {job}: no webhook"])
    assert conveyor(server, "webhook", "show", job).err == [f"job {job} has no webhook"]


@pytest.mark.extended
def test_the_log_shows_each_attempt_and_an_event_is_sent_again(server: ConveyorServer) -> None:
    with Receiver(500) as receiver:
        job = page_job(server, "--webhook", receiver.url)
        receiver.gets(1)
        receiver.status = 200
        receiver.gets(2)  # the second attempt, after five seconds
    [delivery] = ended(server, 1)
    event = delivery["delivery_id"]
    listed = conveyor(server, "webhook", "log", "--job", job, "--since", "1h")
    detail = conveyor(server, "webhook", "log", event)
    health = conveyor(server, "webhook", "show", job)
    for short in (event.lower(), event[:-3], event[:12].lower(), "last"):
        assert conveyor(server, "webhook", "log", short).out == detail.out
    with Receiver(200) as second:
        conveyor(server, "webhook", "set", job, second.url)
        replayed = conveyor(server, "webhook", "replay", event[:-1].lower())
        second.gets(1)

    assert listed.out[1].split()[:2] == [event, delivery["created_at"][:10]]
    assert listed.out[1].split()[3:] == ["delivered", "run.completed"]
    assert all(len(line) <= 80 for line in [*listed.out, *detail.out])
    assert detail.out[0] == f"delivery {event}: run.completed, delivered"
    numbers_and_outcomes = [(line.split()[0], line.split()[3]) for line in detail.out[2:]]
    assert numbers_and_outcomes == [("1", "http_5xx:500"), ("2", "delivered")]
    assert health.out[1].startswith("last attempt   delivered, ")
    assert (replayed.code, replayed.out) == (0, [f"delivery {event}: pending"])
    assert second.got[0][1] == receiver.got[0][1]
    assert second.got[0][0]["X-Conveyor-Replay"] == "true"


@pytest.mark.extended
def test_a_window_of_events_is_sent_again(server: ConveyorServer) -> None:
    for _ in range(2):
        page_job(server, "--webhook", HOOK)
    ended(server, 2)
    none = conveyor(server, "webhook", "replay", "--since", "1h")
    both = conveyor(server, "webhook", "replay", "--since", "1h", "--status", "delivered")
    [newest, _] = ended(server, 2)
    last = conveyor(server, "webhook", "replay", "last", "--json")
    early = ["--until", "2h", "--status", "delivered"]
    before = conveyor(server, "webhook", "replay", "--since", "3h", *early, "--json")

    assert json.loads(last.out[0])["delivery_id"] == newest["delivery_id"]
    assert (none.code, none.out) == (0, ["0 events queued again"])
    assert (both.code, both.out) == (0, ["2 events queued again"])
    assert json.loads(before.out[0]) == {"replayed": 0}


@pytest.mark.parametrize(
    "words",
    [
        ["webhook", "replay"],
        ["webhook", "replay", "01EVENT", "--since", "1h"],
        ["webhook", "replay", "01EVENT", "--until", "1h"],
        ["webhook", "replay", "--since", "yesterday"],
        ["webhook", "replay", "--since", "2026-01-01T00:00"],
        ["webhook", "log", "01EVENT", "--status", "failed"],
        ["webhook", "set", "last", HOOK, "--event", "run.deleted"],
        ["webhook", "sample", "run.deleted"],
        ["webhook", "sample", "run.failed", "--secret", "short"],
        ["webhook", "sample", "run.failed", *["--secret", "-"] * 3],
        ["submit", "http://fake.test/", "--sign"],
    ],
    ids=" ".join,
)
def test_a_wrong_line_is_told_in_one(server: ConveyorServer, words: list[str]) -> None:
    ran = conveyor(server, *words)
    assert (ran.code, ran.out, len(ran.err)) == (2, [], 1)


@pytest.mark.parametrize("verb", ["log", "replay"])
def test_a_delivery_that_is_not_there_is_told(server: ConveyorServer, verb: str) -> None:
    for event in ("01M8MEDFTGV7KEBCT8GZ4BZHEJ", ".."):
        ran = conveyor(server, "webhook", verb, event)
        assert (ran.code, ran.err) == (1, [f"conveyor: no such delivery: {event}"])


@pytest.mark.parametrize("kind", ["run.completed", "run.failed", "run.stopped", "webhook.test"])
def test_a_sample_is_what_a_receiver_would_get(kind: str) -> None:
    secrets = [base64.b64encode(bytes([number]) * 32).decode() for number in (1, 2)]
    words = [*CLIENT, "webhook", "sample", kind, "--kid", "k1"]
    words += ["--secret", "-", "--secret", secrets[1]]
    done = subprocess.run(words, input=f"{secrets[0]}\n".encode(), capture_output=True, check=True)
    head, _, body = done.stdout.partition(b"\n\n")
    headers = dict(line.split(": ", 1) for line in head.decode().splitlines())

    assert json.loads(body)["event_type"] == kind
    assert json.loads(body)["event_id"] == headers["X-ZenRows-Event-Id"] == headers["webhook-id"]
    WebhookEvent.model_validate_json(body, strict=True)
    assert verify_webhook_signature(body, headers["X-Signature"], {"k1": secrets[0]})
    for secret in secrets:
        assert Webhook(secret).verify(body, headers)
        assert secret.encode() not in done.stdout
    assert done.stderr == b""


def test_a_sample_is_not_signed_without_a_secret(server: ConveyorServer) -> None:
    ran = conveyor(server, "webhook", "sample", "run.failed", "--json")
    given = json.loads(ran.out[0])
    assert (ran.code, len(ran.out)) == (0, 1)
    assert "X-Signature" not in given["headers"]
    assert json.loads(given["body"])["failure_reason"] == "insufficient_credits"
