"""kill -9 around the ends of runs: each run that ended has one event, delivered at least once."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from conveyor.testing.gateway_server import GatewayServer
from tests.acceptance.support_data import kill_while_booting, rows_left, server
from tests.acceptance.support_event_kills import (
    SlowReceiver,
    all_delivered,
    assert_one_event_a_run,
    jobs_to_tell,
    logged,
    slow_receiver,
)
from tests.acceptance.support_wire import Wire, eventually

pytestmark = [pytest.mark.server, pytest.mark.slow]

SETTINGS: dict[str, object] = {
    "max_interruptions": 1_000,
    "shutdown_grace": 0,
    "outbox_interval": 0.1,
}
_UNTOLD = "SELECT run_id FROM notices WHERE subscriber = 'webhook' AND ended_at > 0"
_UNDELIVERED = "SELECT delivery_id FROM deliveries WHERE status = 'pending'"


def submit(wire: Wire, receiver: SlowReceiver, name: str) -> list[str]:
    """Submit jobs whose runs end soon, and stop the last one; return their ids."""
    made = [wire.ask("POST", "/jobs", body=body)["job_id"] for body in jobs_to_tell(receiver, name)]
    wire.ask("POST", f"/jobs/{made[-1]}/stop")
    return made


@pytest.mark.guarantee("G20")
@pytest.mark.parametrize(
    ("kills", "seed"),
    [
        (8, 1),
        pytest.param(40, 2, marks=(pytest.mark.full, pytest.mark.timeout(900)), id="full"),
    ],
)
def test_each_run_has_one_event_whenever_the_server_is_killed(
    tmp_path: Path, gateway: GatewayServer, kills: int, seed: int
) -> None:
    draw = random.Random(seed)
    flags = ("--gateway", gateway.url)
    jobs: list[str] = []
    cut_off = 0
    with slow_receiver(seed) as receiver:
        for number in range(kills):
            with (
                server(tmp_path, *flags, **SETTINGS) as process,
                Wire(process.info.api) as wire,
            ):
                jobs += submit(wire, receiver, f"kill-{number}")
                time.sleep(draw.random() * 0.4)  # the moment is what the test varies
            cut_off += len(rows_left(tmp_path, _UNTOLD)) + len(rows_left(tmp_path, _UNDELIVERED))
            if number % 4 == 3:
                kill_while_booting(tmp_path, *flags, after=draw.random(), **SETTINGS)
        with server(tmp_path, *flags, **SETTINGS) as process, Wire(process.info.api) as wire:
            runs = [wire.ended(job_id) for job_id in jobs]
            eventually(lambda: all_delivered(wire, len(jobs)), "each end is told")
            deliveries = logged(wire)
    assert cut_off > 0  # some kills came between an end and its delivery
    assert_one_event_a_run(receiver, runs, deliveries)
