"""A database of the version before webhooks, with notices in it, opens, and they are delivered."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from conveyor.dev.binding import DevBinding, open_binding
from conveyor.dev.sqlite.rows import to_json
from conveyor.domain.api_keys import NONCE_LENGTH, KeySealer, secret_bytes
from conveyor.domain.run_events import RunFinished
from conveyor.domain.webhooks import Webhook
from conveyor.engine.telemetry import Telemetry
from conveyor.ports.outbox import EntryKey, Subscriber
from conveyor.testing.clock import FakeClock
from tests.conformance.world import CALLER, World
from tests.unit.earlier_files import BEFORE_WEBHOOKS, EarlierFile, write_earlier_file
from tests.unit.wired_handlers import notifier

SECRET = "the root secret of the directory"
DECIDED = RunFinished('{"event_type":"run.stopped"}', "Conveyor.RunStopped")
HEARTBEAT = 30.0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class Upgraded:
    """A data directory of the earlier version that the present one has opened."""

    dev: DevBinding
    clock: FakeClock
    runs: dict[str, str]

    @property
    def world(self) -> World:
        return World(self.dev.store, self.clock)

    async def look(self) -> None:
        """Deliver what is due."""
        look = notifier(self.dev.ports, self.clock, observer=Telemetry(), heartbeat=HEARTBEAT)
        await look.deliver()

    def told(self) -> dict[str, dict[str, Any]]:
        """Return what lies in the file of callbacks, by token; each came once."""
        path = self.dev.directory.callbacks
        lines = path.read_text().splitlines() if path.exists() else []
        found = {line["task_token"]: line for line in map(json.loads, lines)}
        assert len(found) == len(lines)
        return found


def _fill(file: EarlierFile, clock: FakeClock, runs: dict[str, str]) -> None:
    sealer = KeySealer([secret_bytes(SECRET)])
    sealed = sealer.seal("a key", caller=CALLER, nonce=clock.token(NONCE_LENGTH))
    for token in ("live", "ended", "decided", "gone", "leased"):
        runs[token] = file.submit(1, token=token, sealed=sealed)
    for token in ("ended", "decided", "gone", "leased"):
        file.change("UPDATE runs SET status = 'stopped' WHERE run_id = ?", runs[token])
    file.change(
        "UPDATE notices SET ending = ?, decided_at = 1, attempts = 2 WHERE run_id = ?",
        to_json(DECIDED),
        runs["decided"],
    )
    file.change("DELETE FROM runs WHERE run_id = ?", runs["gone"])
    file.change(
        "UPDATE notices SET leased_until = ? WHERE run_id = ?", clock.now() + 60_000, runs["leased"]
    )


@pytest.fixture
async def upgraded(tmp_path: Path) -> AsyncIterator[Upgraded]:
    clock, runs = FakeClock(), dict[str, str]()
    write_earlier_file(
        tmp_path / "conveyor.db",
        clock,
        version=BEFORE_WEBHOOKS,
        fill=lambda file: _fill(file, clock, runs),
    )
    dev = await open_binding(tmp_path, clock, secret=SECRET)
    yield Upgraded(dev, clock, runs)
    await dev.ports.aclose()


async def test_notices_of_runs_that_had_ended_are_delivered(upgraded: Upgraded) -> None:
    await upgraded.look()
    told = upgraded.told()
    assert set(told) == {"ended", "decided", "gone", "leased"}
    assert told["decided"]["cause"] == json.loads(DECIDED.event)
    for token in ("ended", "gone", "leased"):
        assert told[token]["error"] == "Conveyor.RunStopped"
        assert told[token]["cause"]["run_id"] == upgraded.runs[token]


async def test_the_notice_of_a_run_that_goes_on_is_delivered_at_its_end(upgraded: Upgraded) -> None:
    await upgraded.look()
    assert "live" not in upgraded.told()
    await upgraded.world.succeed(upgraded.runs["live"], 0)
    await upgraded.look()
    event = upgraded.told()["live"]["output"]
    assert (event["event_type"], event["run_id"]) == ("run.completed", upgraded.runs["live"])
    assert await upgraded.dev.ports.outbox.due_entries(now=1 << 60, limit=10) == []


async def test_a_job_of_then_can_have_a_webhook_beside_its_callback(upgraded: Upgraded) -> None:
    run_id = upgraded.runs["live"]
    [job_id] = [
        view.job.job_id
        for view in await upgraded.dev.ports.jobs.list_jobs(
            CALLER, status=None, before=None, limit=10
        )
        if view.job.latest_run_id == run_id
    ]
    await upgraded.dev.ports.jobs.set_webhook(
        CALLER, job_id, Webhook("https://example.com/hook"), now=upgraded.clock.now()
    )
    due = await upgraded.dev.ports.outbox.due_entries(now=upgraded.clock.now(), limit=10)
    assert {key.subscriber for key in due if key.run_id == run_id} == set(Subscriber)
    key = EntryKey(run_id, Subscriber.WEBHOOK)
    entry = await upgraded.dev.ports.outbox.lease_entry(
        key, now=upgraded.clock.now(), lapses_at=upgraded.clock.now() + 1_000
    )
    assert entry is not None
    assert entry.callback is None
