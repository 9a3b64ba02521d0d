"""Workers of the version before limits of hosts beside those of today, as in a rolling deployment:
its source is taken out of the history, and both run over the same services."""

from __future__ import annotations

import io
import re
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from conveyor.testing.fleet import RoleFleet, RoleProcess
from tests.acceptance.support_fleet import fleet
from tests.acceptance.support_fleet_runs import QUICK, assert_exact, pages, waiting_for
from tests.acceptance.support_wire import Wire
from tests.architecture.source import ROOT
from tests.patient import fetched

pytestmark = [pytest.mark.server, pytest.mark.full, pytest.mark.extended, pytest.mark.slow]

WITHOUT_HOSTS = "f9de0121"
"""The last commit whose messages name no host."""
OLD_WORKERS = 2
TASKS = 300


def earlier_source(directory: Path) -> Path:
    """Unpack the package of the version before; skip the test where there is no history."""
    command = ["git", "-C", str(ROOT), "archive", WITHOUT_HOSTS, "conveyor"]
    try:
        packed = subprocess.run(command, capture_output=True, check=True, timeout=60).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("the history of the project is not here")
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(directory, filter="data")
    return directory


@contextmanager
def earlier_workers(running: RoleFleet, directory: Path) -> Iterator[list[RoleProcess]]:
    """Workers of the version before, in the environment of a fleet."""
    source = earlier_source(directory / "earlier")
    # Without its safe path, Python would look into the present directory first.
    environment = {**running.environment, "PYTHONPATH": str(source), "PYTHONSAFEPATH": "1"}
    with ExitStack() as stack:
        workers = []
        for number in range(OLD_WORKERS):
            log = running.directory / f"earlier-{number}.log"
            worker = RoleProcess("worker", log, environment)
            worker.start()
            stack.callback(worker.end)
            workers.append(worker)
        for worker in workers:
            worker.ready()
        yield workers


def ended_at(worker: RoleProcess) -> int:
    """The tasks that ended at a worker."""
    page = fetched(f"{worker.info.metrics}/metrics").text
    found = re.search(r'^conveyor_tasks_total\{state="successful"\} (\S+)$', page, re.MULTILINE)
    return 0 if found is None else int(float(found[1]))


def done(wire: Wire, job: dict[str, Any]) -> int:
    """The tasks of a job that have ended."""
    completed: int = wire.latest_run(job["job_id"])["stats"]["completed"]
    return completed


@pytest.mark.timeout(600)
def test_old_and_new_workers_work_old_and_new_messages_side_by_side(tmp_path: Path) -> None:
    plain, polite = pages("plain", TASKS, delay=0.2), pages("polite", TASKS, delay=0.1)
    with (
        fleet(tmp_path, apis=1, workers=2, **QUICK) as running,
        earlier_workers(running, tmp_path) as earlier,
        Wire(running.api) as wire,
    ):
        for worker in running.workers:
            worker.end()
        # Messages of the second job name their host, those of the first are as they always were.
        first = wire.submit(plain, max_inflight=4)
        second = wire.submit(polite, max_inflight=4, politeness={"per_host": 4})
        waiting_for(lambda: sum(map(ended_at, earlier)) >= TASKS // 4 or None, "the old ones work")
        assert done(wire, second) == 0, "they leave the messages of the second job alone"

        for worker in running.workers:
            running.restart(worker)
        waiting_for(lambda: done(wire, second) >= 20 or None, "the new ones work beside them")
        assert all(worker.alive for worker in earlier)

        for worker in earlier:
            assert worker.end() == 0
        for job, urls in ((first, plain), (second, polite)):
            assert assert_exact(wire, running, job["job_id"], urls, faults=0) == 0
        assert sum(map(ended_at, running.workers)) >= TASKS, "the second job is theirs alone"
        assert running.admin("dlq", "list", "--json") == ""
        told = b"".join(worker.log.read_bytes() for worker in earlier)
        assert b"its version is newer than this process" in told
        assert b"Traceback" not in told + running.output()
