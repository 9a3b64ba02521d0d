"""Plans simulations of a reader's own fleet: the scenarios, their length, and remarks on the
results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

from conveyor.client.output import count, duration
from conveyor.settings import Settings
from conveyor.simulation import REALISTIC_COOL, JobPlan, Latency, Scenario
from conveyor.simulation.gateway import HostPicker, call_time
from conveyor.simulation.view import Row, brief, unfinished

RESERVING = ("reserve", "reserve-strict")
TIMEOUT = Settings().gateway_timeout
PATIENCE = 300.0
"""Real seconds that the command may take; larger questions are refused with advice."""

_TASK_COST = 1 / 3_500
"""Real seconds that one task costs, whatever the policy."""
_WORKER_COST = 1 / 2_500
"""Real seconds that one worker costs in a virtual second: timers, renewals, looks for runs."""
_SLOT_COST = 1 / 4_000
"""Real seconds that one free slot costs in a virtual second if messages come before permits."""
_WINDOW_COST = 5.0
"""Real seconds to spend on a policy that receives first."""
_WORTH_TELLING = 0.001
_SHARES = (0.7, 0.5, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01, 1e-3, 1e-6)
_SHRINKABLE = (
    ("tasks",),
    ("workers",),
    ("slots",),
    ("tasks", "workers"),
    ("tasks", "workers", "slots"),
)
"""The fields to advise making smaller; the first that helps."""
_STARTING = 10.0
"""Virtual seconds that a job may take beside its gateway calls."""
_LEAST_CALLS = 5
"""Consecutive gateway calls in the shortest window that is worth simulating."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A fleet and a job: `workers` of `slots` gateway calls each, `tasks` under a `cap`.

    `latency` is the median of a gateway call in seconds, `sigma` its lognormal spread. The tasks
    are spread over `hosts`, each with the limits `host_limit` and `host_rate`, 0 for none.
    """

    tasks: int
    cap: int
    workers: int
    slots: int
    latency: float
    sigma: float
    policies: tuple[str, ...]
    seed: int
    hosts: int = 1
    host_limit: int = 0
    host_rate: float = 0.0

    @property
    def at_a_time(self) -> int:
        """Return the maximum number of gateway calls in flight."""
        most = min(self.cap, self.workers * self.slots)
        return min(most, self.hosts * self.host_limit) if self.host_limit else most

    @property
    def has_host_limits(self) -> bool:
        """Return whether hosts have limits."""
        return bool(self.host_limit or self.host_rate)

    @property
    def mean(self) -> float:
        """Return the mean seconds of a gateway call."""
        return self.latency * math.exp(self.sigma**2 / 2)

    @property
    def timing_out(self) -> float:
        """Return the share of gateway calls that take longer than a worker waits."""
        if not self.sigma:
            return float(self.latency > TIMEOUT)
        return 1 - NormalDist().cdf(math.log(TIMEOUT / self.latency) / self.sigma)

    @property
    def expected_seconds(self) -> float:
        """Return about how many virtual seconds the job takes if no permit is ever idle."""
        starting = self.tasks / (self.hosts * self.host_rate) if self.host_rate else 0.0
        return max(self.tasks * self.mean / self.at_a_time, self.mean, starting)

    def least_seconds(self) -> float:
        """Return the virtual seconds that this very job, with calls by seed, takes at least."""
        latency = Latency(self.latency, self.sigma)
        starts = math.ceil(self.tasks / self.hosts)
        longest = (starts - 1) / self.host_rate if self.host_rate else 0.0
        spent = 0.0
        picker = HostPicker(self.hosts)
        for index in range(self.tasks):
            url = picker.url(0, index)
            took = min(call_time(latency, self.seed, url=url, attempt=1), TIMEOUT)
            longest = max(longest, took)
            spent += took
        return max(spent / self.at_a_time, longest)


def scenarios(question: Question) -> list[Scenario]:
    """Make one simulation for each policy, all of the same work.

    Policies that take permits first run the job to its end. The others get four times the time that
    it should take with no permit idle, or as much as can be simulated within some seconds; the
    permits of their messages lie in a store that keeps the cap, so that none gains by breaking it.
    """
    world = replace(
        REALISTIC_COOL,
        name="own",
        slots=question.slots,
        gateway=Latency(question.latency, question.sigma),
    )
    return [
        Scenario(
            world=world,
            policy=policy,
            jobs=(JobPlan(tasks=question.tasks, cap=question.cap),),
            workers=question.workers,
            permit_store="ledger" if policy in RESERVING else "atomic-rows",
            window=None if policy in RESERVING else _window(question),
            seed=question.seed,
            hosts=question.hosts,
            host_limit=question.host_limit,
            host_rate=question.host_rate,
        )
        for policy in question.policies
    ]


def real_seconds(question: Question) -> float:
    """Estimate the real seconds that all simulations take."""
    return sum(
        _full_run_cost(question)
        if scenario.window is None
        else scenario.window * _receiving_cost(question)
        for scenario in scenarios(question)
    )


def refusal(question: Question) -> str | None:
    """Say why a question is too large, and what to make smaller; None if it is not too large."""
    needed = real_seconds(question)
    if needed <= PATIENCE:
        return None
    for fields in _SHRINKABLE:
        for share in _SHARES:
            smaller = {
                field: max(int(_rounded(getattr(question, field) * share)), 1) for field in fields
            }
            changed: dict[str, Any] = dict(smaller)
            if real_seconds(replace(question, **changed)) <= PATIENCE:
                advice = " ".join(f"--{field} {value}" for field, value in smaller.items())
                return f"simulating that takes about {duration(needed)}: try {advice}"
    raise AssertionError("the smallest question is never too large")


def remarks(question: Question, rows: Sequence[Row]) -> list[str]:
    """List remarks that the table does not show by itself."""
    lines = [f"At best the job takes {brief(question.least_seconds())}."]
    if question.cap > question.workers * question.slots:
        are = "is" if question.at_a_time == 1 else "are"
        slots = count(question.at_a_time, "slot")
        lines.append(f"The cap is never reached: there {are} {slots} in all.")
    cut = {row["policy"]: row["window_s"] for row in rows if unfinished(row)}
    if cut:
        window = max(float(seconds or 0) for seconds in cut.values())
        lines.append(f"Cut off after {brief(window)}: {', '.join(map(str, cut))}.")
    share = question.timing_out
    if share >= _WORTH_TELLING:
        lines.append(
            f"Calls time out after {TIMEOUT:g} s and are repeated; {share:.1%} are expected to."
        )
    hashes = {row["policy"]: row["trace_hash"] for row in rows}
    if "off" in hashes and hashes["off"] == hashes.get("local"):
        lines.append("local did exactly what off did: it held no worker back.")
    lines.append("Latencies of queue and stores are assumed; the worker is the one of production.")
    return lines


def _full_run_cost(question: Question) -> float:
    return question.tasks * _TASK_COST + question.expected_seconds * question.workers * _WORKER_COST


def _receiving_cost(question: Question) -> float:
    """Return the real seconds for a virtual one if messages come before permits."""
    return (
        question.at_a_time / question.mean * _TASK_COST
        + question.workers * _WORKER_COST
        + question.workers * question.slots * _SLOT_COST
    )


def _window(question: Question) -> float:
    affordable = max(_WINDOW_COST / _receiving_cost(question), _LEAST_CALLS * question.mean)
    return _rounded(min(4 * question.expected_seconds + _STARTING, affordable))


def _rounded(value: float) -> float:
    """Round to two significant digits."""
    return float(f"{value:.2g}")
