"""References that are sent with their hosts, where limits of hosts hold."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from conveyor.domain.hosts import HostPattern, HostPolicies, HostRules, Politeness
from conveyor.ports.queues import MOST_HOST_QUEUES
from conveyor.records.task_sending import LEAST_ROWS, TaskSender
from conveyor.service.context import NO_LIMITS
from conveyor.testing.clock import FakeClock
from tests.architecture.source import read_modules

MANNERS = Politeness(per_host=2)
EVERY_HOST = HostPolicies(lambda: HostRules(limit=3))


@dataclass
class Store:
    """A run: its hosts with a queue, its tasks' hosts, and all that was asked and sent."""

    hosts: tuple[str, ...] = ()
    calls: list[str] = field(default_factory=list)
    sent: list[tuple[list[int], list[str], tuple[str, ...]]] = field(default_factory=list)

    async def add_hosts(self, run_id: str, hosts: Sequence[str], *, now: int) -> tuple[str, ...]:
        """Append, as the runs port."""
        self.calls.append("add_hosts")
        self.hosts = tuple(dict.fromkeys([*self.hosts, *hosts]))[:MOST_HOST_QUEUES]
        return self.hosts

    async def unfinished_after(self, run_id: str, after: int, limit: int) -> list[tuple[int, str]]:
        """No sender looks for rows."""
        raise AssertionError("the references are known")

    async def task_hosts(self, run_id: str, tasks: Sequence[tuple[int, str]]) -> list[str]:
        """Answer as the tasks port."""
        self.calls.append("task_hosts")
        return [f"h{index % 10}.example:443" for index, _ in tasks]

    async def send_tasks(
        self,
        job_id: str,
        run_id: str,
        tasks: Sequence[tuple[int, str]],
        hosts: Sequence[str] = (),
        lanes: Sequence[str] = (),
    ) -> None:
        """Keep what is sent."""
        self.sent.append(([index for index, _ in tasks], list(hosts), tuple(lanes)))

    def sender(self, policies: HostPolicies) -> TaskSender:
        """A sender of a process that has just begun."""
        return TaskSender(cast(Any, self), self, self, policies, FakeClock())


def tasks(first: int, count: int) -> list[tuple[int, str]]:
    """References to rows."""
    return [(index, f"t{index}") for index in range(first, first + count)]


def urls(count: int, hosts: int) -> list[str]:
    """URLs of hosts that take turns."""
    return [f"https://h{number % hosts}.example/{number}" for number in range(count)]


async def test_without_limits_nothing_is_asked_and_no_url_is_looked_at() -> None:
    store = Store()
    await store.sender(NO_LIMITS).send(
        "J", "R", tasks(0, 2_000), politeness=None, urls=(str(1 / 0) for _ in range(2_000))
    )
    await store.sender(NO_LIMITS).send("J", "R", tasks(0, 2_000), politeness=Politeness())
    assert store.calls == []
    assert [(len(indexes), hosts, lanes) for indexes, hosts, lanes in store.sent] == [
        (2_000, [], ())
    ] * 2


@pytest.mark.parametrize(
    ("policies", "politeness"), [(NO_LIMITS, MANNERS), (EVERY_HOST, None), (EVERY_HOST, MANNERS)]
)
async def test_the_hosts_of_a_large_run_get_queues_in_the_order_of_their_appearance(
    policies: HostPolicies, politeness: Politeness | None
) -> None:
    store = Store()
    await store.sender(policies).send(
        "J", "R", tasks(0, LEAST_ROWS), politeness=politeness, urls=urls(LEAST_ROWS, 3)
    )
    hosts = ("h0.example:443", "h1.example:443", "h2.example:443")
    [(_, of_tasks, lanes)] = store.sent
    assert (of_tasks[:4], lanes) == ([*hosts, hosts[0]], hosts)
    assert store.calls == ["add_hosts"]


async def test_a_small_run_gets_none_and_its_references_have_hosts() -> None:
    store = Store()
    count = LEAST_ROWS - 1
    await store.sender(EVERY_HOST).send(
        "J", "R", tasks(0, count), politeness=None, urls=urls(count, 3)
    )
    [(_, of_tasks, lanes)] = store.sent
    assert (of_tasks[1], lanes, store.calls) == ("h1.example:443", (), [])


async def test_the_rows_of_a_run_that_is_still_written_count_from_its_first_stretch() -> None:
    store = Store()
    sender = store.sender(EVERY_HOST)
    for first in range(0, 1_000, 250):
        await sender.send(
            "J", "R", tasks(first, 250), politeness=None, urls=urls(250, 2), rows=1_000
        )
    assert [lanes for *_, lanes in store.sent] == [("h0.example:443", "h1.example:443")] * 4
    assert store.calls == ["add_hosts"]  # what is known is not written again


async def test_a_run_that_grows_gets_queues_from_the_references_that_make_it_large() -> None:
    store = Store()
    for first in range(0, 1_200, 400):
        # Another process takes each addition.
        await store.sender(EVERY_HOST).send(
            "J", "R", tasks(first, 400), politeness=None, urls=urls(400, 2)
        )
    assert [len(lanes) for *_, lanes in store.sent] == [0, 0, 2]


async def test_the_first_63_hosts_have_queues_and_the_others_share_one() -> None:
    store = Store()
    sender = store.sender(EVERY_HOST)
    for first in (0, 2_000):
        await sender.send("J", "R", tasks(first, 2_000), politeness=None, urls=urls(2_000, 100))
    assert store.hosts == tuple(f"h{number}.example:443" for number in range(MOST_HOST_QUEUES))
    assert [lanes for *_, lanes in store.sent] == [store.hosts] * 2
    assert store.calls == ["add_hosts"]


async def test_only_hosts_with_limits_get_queues() -> None:
    store = Store()
    patterns = {"h1.example": HostPattern(limit=1), "h2.example": HostPattern(limit=0)}
    policies = HostPolicies(lambda: HostRules(patterns=patterns))
    await store.sender(policies).send(
        "J", "R", tasks(0, 2_000), politeness=None, urls=urls(2_000, 4)
    )
    [(_, of_tasks, lanes)] = store.sent
    assert (of_tasks[0], lanes) == ("h0.example:443", ("h1.example:443",))


async def test_rows_whose_urls_are_not_at_hand_are_asked_for_their_hosts() -> None:
    store = Store()
    await store.sender(EVERY_HOST).send("J", "R", tasks(0, 2_500), politeness=None)
    assert store.calls == ["task_hosts"] * 3 + ["add_hosts"]
    [(_, of_tasks, lanes)] = store.sent
    assert (len(of_tasks), of_tasks[2_413], len(lanes)) == (2_500, "h3.example:443", 10)


async def test_what_others_have_written_of_a_run_comes_first() -> None:
    store = Store(hosts=("z.example:80", "h1.example:443"))
    await store.sender(EVERY_HOST).send(
        "J", "R", tasks(5_000, 1_000), politeness=None, urls=urls(1_000, 2)
    )
    [(*_, lanes)] = store.sent
    assert lanes == ("z.example:80", "h1.example:443", "h0.example:443")


async def test_a_run_with_queues_keeps_them_once_no_limits_hold_any_more() -> None:
    store = Store(hosts=("h0.example:443",))
    await store.sender(NO_LIMITS).send("J", "R", tasks(0, 20), politeness=None, lanes=store.hosts)
    [(_, of_tasks, lanes)] = store.sent
    assert (of_tasks[0], lanes) == ("h0.example:443", store.hosts)


async def test_a_url_that_cannot_be_read_has_no_host_and_no_queue() -> None:
    store = Store()
    await store.sender(EVERY_HOST).send(
        "J",
        "R",
        tasks(0, 1_000),
        politeness=None,
        urls=["https://"] * 999 + ["https://H.example./"],
    )
    [(_, of_tasks, lanes)] = store.sent
    assert (of_tasks[0], of_tasks[-1], lanes) == ("", "h.example:443", ("h.example:443",))


MAKERS = {"TaskMessage", "task_message", "task_messages", "send_tasks", "has_policy"}
"""Words of whatever makes orders to work tasks, or hands them on."""
SENDERS = {
    "dev.binding": {"has_policy"},
    "dev.queues": {"has_policy"},
    "dev.run_queue": {"TaskMessage", "task_message"},
    "handlers.task": {"TaskMessage"},
    "ports.queues": {"TaskMessage", "task_message"},
    "prod.binding": {"has_policy"},
    "prod.sqs.queues": {"has_policy", "task_messages"},
    "records.task_sending": {"send_tasks"},
    "simulation.process": {"has_policy"},
    "simulation.queues": {"has_policy", "send_tasks", "task_messages"},
    "simulation.simulate": {"send_tasks"},
    "testing.faults": {"send_tasks"},
}
"""The modules that do so, each of which has been looked at: an adapter of queues names the hosts of
what it refills from the rows if the run `has_policy`, everybody else asks the sender of references,
and the handler sends none: it only tells of an end."""


@pytest.mark.slow
def test_whatever_sends_references_names_the_hosts_where_a_policy_holds() -> None:
    found: dict[str, set[str]] = {}
    for module in read_modules().values():
        for node in ast.walk(module.tree):
            called = node.func if isinstance(node, ast.Call) else node
            word = called.attr if isinstance(called, ast.Attribute) else ""
            if isinstance(node, ast.Call) and isinstance(called, ast.Name):
                word = called.id
            if word in MAKERS:
                found.setdefault(module.name.partition(".")[2], set()).add(word)
    assert found == SENDERS
