"""Events of a development server without a network: the official client, receivers under names of
documentation, and the inbox that gets their events."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from zenrows.batch import (
    At,
    Calendar,
    Daily,
    Monthly,
    Rate,
    Schedule,
    Weekly,
    verify_webhook_signature,
)
from zenrows.batch._typed_dicts import WebhookDict
from zenrows.batch.models import ScheduleState

from tests.acceptance.support_boot import Booted, boot
from tests.acceptance.support_client import open_client
from tests.acceptance.support_wire import eventually
from tests.patient import fetched

pytestmark = [pytest.mark.server, pytest.mark.slow]
HOOK = "https://hooks.example.com/x?y=1"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Booted]:
    with boot(tmp_path_factory.mktemp("data"), "--gateway", "fake") as booted:
        yield booted


def requests_to(server: Booted, name: str) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = fetched(f"{server.inbox}/{name}").json()["requests"]
    return listed


def test_the_events_for_a_name_of_documentation_come_to_the_inbox(server: Booted) -> None:
    with open_client(server) as client:
        key = client.rotate_hmac_key()
        tested = client.test_webhook({"url": HOOK, "signature": True})

    assert (tested.delivered, tested.status_code) == (True, 204)
    [kept] = requests_to(server, "hooks.example.com")
    body = base64.b64decode(kept["body_base64"])
    signature = kept["headers"]["x-signature"]
    assert (kept["path"], kept["headers"]["x-zenrows-event-id"]) == ("/x?y=1", tested.event_id)
    assert verify_webhook_signature(body, signature, {key.kid: key.secret})
    assert kept["verified"] == {"x_signature": True, "webhook_signature": True, "client": True}
    assert key.secret not in str(kept)


@pytest.mark.parametrize(
    "host",
    [
        "example.net",
        "a.example.org.",
        "EXAMPLE.com:8443",
        "receiver.test",
        "x.invalid",
        "y.example",
    ],
)
def test_every_reserved_name_has_an_inbox(server: Booted, host: str) -> None:
    with open_client(server) as client:
        assert client.test_webhook({"url": f"http://{host}", "signature": False}).delivered
    name = host.partition(":")[0].rstrip(".").lower()
    assert [kept["path"] for kept in requests_to(server, name)] == ["/"]


SCHEDULES: list[Schedule] = [
    At("2099-09-01T09:00", timezone="Europe/Berlin"),
    Rate(every=6, unit="hour"),
    Calendar(["09:00"], Daily(), "Europe/Berlin"),
    Calendar(["09:00", "18:00"], Weekly(["mon", "fri"]), "America/New_York"),
    Calendar(["00:00"], Monthly([1, 15]), "UTC"),
]


def events_of(server: Booted, runs: set[str]) -> list[dict[str, Any]]:
    """Return the events in the inbox, once those of these runs are there."""

    def look() -> list[dict[str, Any]] | None:
        kept = requests_to(server, "hooks.example.com")
        return kept if runs <= {json.loads(one["text"])["run_id"] for one in kept} else None

    return eventually(look, "the events of all runs")


def test_the_operations_on_webhooks_keys_and_schedules_work_without_a_network(
    tmp_path: Path,
) -> None:
    """Every answer is held against the client's models as it comes."""
    with boot(tmp_path, "--gateway", "fake") as server, open_client(server) as client:
        hook: WebhookDict = {"url": HOOK, "signature": True}
        secrets = {}
        for _ in range(2):
            key = client.rotate_hmac_key()
            secrets[key.kid] = key.secret
        keys = client.list_hmac_keys()
        assert keys.active is not None
        assert keys.candidate is not None
        assert {keys.active.kid, keys.candidate.kid} == set(secrets)
        client.cancel_hmac_rotation()
        key = client.rotate_hmac_key()
        secrets[key.kid] = key.secret
        assert client.finalize_hmac_key().active_kid == key.kid
        assert client.test_webhook(hook).delivered

        job = client.submit_scheduled(SCHEDULES[1], ["https://example.com/a"], webhook=hook)
        for schedule in SCHEDULES:
            assert job.schedule.update(schedule).data.next_scheduled_run is not None
        assert job.schedule.pause().data.schedule_state is ScheduleState.PAUSED
        assert job.schedule.resume().data.schedule_state is ScheduleState.ACTIVE
        first = job.rerun()
        first.wait(timeout=60)
        assert str(client.get_job_webhook(job.job_id).url) == hook["url"]
        moved = client.put_job_webhook(job.job_id, {"url": f"{HOOK}&z=2", "signature": True})
        assert str(moved.url) == f"{HOOK}&z=2"
        second = job.rerun()
        second.wait(timeout=60)
        events = events_of(server, {"test", first.run_id, second.run_id})
        client.delete_job_webhook(job.job_id)
        job.delete()

    for event in events:
        raw = base64.b64decode(event["body_base64"])
        assert verify_webhook_signature(raw, event["headers"]["x-signature"], secrets)
        assert event["verified"] == {"x_signature": True, "webhook_signature": True, "client": True}
    assert len({event["headers"]["x-zenrows-event-id"] for event in events}) == len(events) == 3
