"""Hosts that refuse calls, where a policy holds: they are closed for the whole fleet, or their
ceiling on calls in flight is lowered, and grows again with each success."""

from __future__ import annotations

import logging

from conveyor.aio.resilience import log_failure
from conveyor.domain.backoff import Backoff
from conveyor.domain.errors import ConveyorError
from conveyor.domain.hosts import HostPolicies, host_and_port, host_key
from conveyor.domain.model import Job
from conveyor.ports.clock import Clock
from conveyor.ports.gateway import HostPace, HostRefusal
from conveyor.ports.pacing import Pacing

SPREAD = 1.0
"""Seconds over which the first calls after the end of a pause are spread."""

_log = logging.getLogger("conveyor.hosts")


class HostAnswers:
    """Heeds what hosts answer to the calls of runs that have a policy."""

    def __init__(
        self, policies: HostPolicies, pacing: Pacing, clock: Clock, *, backoff: Backoff
    ) -> None:
        self._policies = policies
        self._pacing = pacing
        self._clock = clock
        self._backoff = backoff

    async def refused(self, job: Job, refusal: HostRefusal, *, began: float) -> float | None:
        """Close a host that refused a call, or lower its ceiling if it did not say for how long;
        one that has none, or the lowest, is closed for a backoff. Return the seconds for which it
        is closed, None where no policy holds. `began`: the monotonic second of the call."""
        rules = self._policies.rules_of(refusal.host, job.caller, job.politeness)
        if not rules:
            return None
        key = host_key(refusal.host, job.caller) if refusal.is_private else rules[0].key
        limit = next((rule.limit for rule in rules if rule.key == key), 0)
        seconds = max(refusal.seconds or 0.0, self._backoff.spread(1, self._clock.random()))
        try:
            if refusal.seconds is None and limit > 1:
                age = self._clock.monotonic() - began
                if await self._pacing.lower(key, limit, age) > 1:
                    return 0.0
            await self._pacing.close(key, seconds)
        except ConveyorError as error:
            log_failure(_log, "the fleet was not told that a host refuses calls", error)
        return seconds

    async def served(self, job: Job, url: str) -> None:
        """Let the lowered ceiling of a host that answered grow by one."""
        host = host_and_port(url)
        try:
            for rule in self._policies.rules_of(host, job.caller, job.politeness):
                if rule.limit:
                    await self._pacing.lift(rule.key, rule.limit)
        except ConveyorError as error:
            log_failure(_log, "the ceiling of a host was not raised", error)

    async def paced(self, job: Job, pace: HostPace) -> None:
        """Let the calls of a caller to a host be as far apart as the host wants."""
        try:
            key = host_key(pace.host, job.caller)
            await self._pacing.slow(key, pace.interval, pace.seconds)
        except ConveyorError as error:
            log_failure(_log, "the fleet was not told of the pace of a host", error)
