"""A fleet whose Redis fails over to a replica, in good order and by a crash: work goes on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from conveyor.testing.fleet import RoleFleet
from conveyor.testing.load_balancer import LoadBalancer, load_balancer
from tests.acceptance.support_bindings import metrics
from tests.acceptance.support_fleet import fleet
from tests.acceptance.support_fleet_runs import (
    CAP,
    QUICK,
    assert_exact,
    pages,
    until_called,
    waiting_for,
)
from tests.acceptance.support_wire import Wire
from tests.conformance.redis_process import RedisProcess
from tests.patient import fetched

pytestmark = [pytest.mark.server, pytest.mark.extended, pytest.mark.timeout(600)]

LEASE = 20
"""So long that a busy machine forfeits nothing, and so short that a closed ledger opens."""
TASKS = 200
AWAY = (200, {"status": "ready", "away": ["redis"]})
READY = (200, {"status": "ready"})


@dataclass
class Group:
    """A primary, its replica, and the name that stands for the primary."""

    primary: RedisProcess
    replica: RedisProcess
    name: LoadBalancer
    url: str

    def promote(self) -> None:
        """Make the replica the primary, and let the name stand for it."""
        self.replica.command("REPLICAOF", "NO", "ONE")
        self.name.servers = [("127.0.0.1", self.replica.port)]
        self.primary, self.replica = self.replica, self.primary

    def follow(self) -> None:
        """Let the replica, or who has been demoted, copy the primary."""
        self.replica.command("REPLICAOF", "127.0.0.1", str(self.primary.port))
        waiting_for(self._copied, "the replica has a copy")

    def _copied(self) -> bool | None:
        told = self.replica.command("INFO", "replication")
        assert isinstance(told, dict)
        return told.get("master_link_status") == "up" or None


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    """Two nodes; the second has a copy of the first."""
    nodes = [RedisProcess(tmp_path_factory.mktemp("redis")) for _ in range(2)]
    with load_balancer([("127.0.0.1", nodes[0].port)]) as (port, name):
        group = Group(nodes[0], nodes[1], name, f"redis://127.0.0.1:{port}/0")
        group.follow()
        yield group
    for node in nodes:
        node.close()


@pytest.fixture(scope="module")
def running(group: Group, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RoleFleet]:
    settings: dict[str, Any] = {**QUICK, "permit_lease": LEASE, "visibility_timeout": LEASE}
    settings |= {"redis_url": group.url, "rate_limit": 1_000, "rate_limit_burst": 1_000}
    directory: Path = tmp_path_factory.mktemp("fleet")
    with fleet(directory, apis=1, workers=2, **settings) as started:
        yield started


def fenced(running: RoleFleet) -> float:
    """Calls that workers ended because their permits had lapsed."""
    found = re.compile(r"^conveyor_fenced_total (\S+)$", re.MULTILINE)
    return sum(float(value) for page in metrics(running, "worker") for value in found.findall(page))


def all_say(running: RoleFleet, wire: Wire, told: tuple[int, Any]) -> bool | None:
    """Return True once every process says so of its readiness, the api after a request."""
    wire.ask("GET", "/jobs")
    answers = [fetched(f"{process.info.metrics}/readyz") for process in running.processes]
    return all((one.status_code, one.json()) == told for one in answers) or None


def test_a_planned_failover_of_redis_costs_nothing(running: RoleFleet, group: Group) -> None:
    urls = pages("planned", TASKS)
    with Wire(running.api) as wire:
        job_id = wire.submit(urls, max_inflight=CAP)["job_id"]
        until_called(running, urls, 3 * CAP)
        before = fenced(running)
        group.promote()
        group.follow()
        assert assert_exact(wire, running, job_id, urls, faults=0) == 0
        assert fenced(running) == before


def test_a_crash_of_the_primary_is_told_and_gone_over_to_the_replica(
    running: RoleFleet, group: Group
) -> None:
    urls = pages("crash", TASKS)
    with Wire(running.api) as wire:
        job_id = wire.submit(urls, max_inflight=CAP)["job_id"]
        until_called(running, urls, 3 * CAP)
        group.primary.kill()
        waiting_for(lambda: all_say(running, wire, AWAY), "every process says that redis is away")
        group.promote()
        assert_exact(wire, running, job_id, urls, faults=1)
        waiting_for(lambda: all_say(running, wire, READY), "every process says that it is back")
