"""Send references to tasks, with their hosts where limits of hosts hold for their run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cachetools import LRUCache

from conveyor.domain.hosts import HostPolicies, Politeness, host_and_port
from conveyor.ports.clock import Clock
from conveyor.ports.queues import MOST_HOST_QUEUES, Queues
from conveyor.ports.records import Dispatchable, RunHosts
from conveyor.ports.tasks import UnfinishedTasks

LEAST_ROWS = 1_000
"""Rows of a run from which on its hosts get queues of their own."""
PIECE = 1_000
"""Rows whose hosts are read at a time."""
_MOST_REMEMBERED = 10_000


async def may_have_policy(runs: Dispatchable, host_limits: bool, run_id: str) -> bool:
    """Tell whether limits of hosts may hold for a run: with `host_limits` those of the server, or
    its own. They may for one of which nothing is known."""
    if host_limits:
        return True
    run = await runs.dispatchable_run(run_id)
    return run is None or bool(run.politeness)


class TaskSender:
    """Sends references, and gives the first hosts of large runs queues of their own.

    Where no limits hold, references go out as they are. The hosts of a run are written before the
    first reference goes into a queue of theirs, so that whoever finds the run finds the queue.
    """

    def __init__(
        self,
        queues: Queues,
        runs: RunHosts,
        tasks: UnfinishedTasks,
        policies: HostPolicies,
        clock: Clock,
    ) -> None:
        self._queues = queues
        self._runs = runs
        self._tasks = tasks
        self._policies = policies
        self._clock = clock
        self._lanes: LRUCache[str, tuple[str, ...]] = LRUCache(_MOST_REMEMBERED)

    async def send(
        self,
        job_id: str,
        run_id: str,
        tasks: Sequence[tuple[int, str]],
        *,
        politeness: Politeness | None,
        urls: Iterable[str] | None = None,
        rows: int = 0,
        lanes: tuple[str, ...] = (),
    ) -> None:
        """Send references, (index, task_id) each, to rows that are already written.

        `urls` are theirs, one each; without them the rows are asked for their hosts. The run has
        `rows` rows, or as many as the references tell. `lanes` are the hosts that are known to have
        a queue of their own.
        """
        if not tasks:
            return
        if not (lanes or self._policies.hold(politeness)):
            await self._queues.send_tasks(job_id, run_id, tasks)
            return
        hosts = await self._hosts(run_id, tasks, urls)
        lanes = max(lanes, self._lanes.get(run_id, ()), key=len)
        if max(rows, tasks[-1][0] + 1) >= LEAST_ROWS and len(lanes) < MOST_HOST_QUEUES:
            lanes = await self._add(run_id, hosts, lanes, politeness)
        await self._queues.send_tasks(job_id, run_id, tasks, hosts, lanes)

    async def _hosts(
        self, run_id: str, tasks: Sequence[tuple[int, str]], urls: Iterable[str] | None
    ) -> list[str]:
        if urls is not None:
            return [host_and_port(url) for url in urls]
        hosts: list[str] = []
        for first in range(0, len(tasks), PIECE):
            hosts += await self._tasks.task_hosts(run_id, tasks[first : first + PIECE])
        return hosts

    async def _add(
        self,
        run_id: str,
        hosts: Sequence[str],
        lanes: tuple[str, ...],
        politeness: Politeness | None,
    ) -> tuple[str, ...]:
        """Give hosts that have limits, and no queue yet, one of their own."""
        new = [
            host
            for host in dict.fromkeys(hosts)
            if host not in lanes and self._policies.rules_of(host, "", politeness)
        ]
        if not new:
            return lanes
        # More than there is room for, since others may have written some of them meanwhile.
        found = await self._runs.add_hosts(run_id, new[:MOST_HOST_QUEUES], now=self._clock.now())
        self._lanes[run_id] = found
        return found
