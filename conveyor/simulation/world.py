"""The worlds of a simulation: the conditions that all compared policies share."""

from __future__ import annotations

from dataclasses import dataclass, replace

from conveyor.engine.planner import Polling
from conveyor.engine.policy import PolicyFactory
from conveyor.ports.queues import MAX_BATCH
from conveyor.settings import Settings
from conveyor.simulation.checks import INSTANT, NEVER, check_count, check_kind, check_time
from conveyor.simulation.latency import Latency
from conveyor.simulation.policies import Bounces, policy_factory

NO_TIME = Latency(0.0)


SHORTEST = {"visibility": 1.0, "permit_lease": 5.0, "heartbeat": 0.1, "discovery_interval": 0.1}
"""Lower bounds of a world's times, in seconds: those of a worker's settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A fleet's surroundings. All times in seconds.

    Each worker has `slots` gateway calls at a time and asks for up to `batch` messages at once; it
    pauses for `empty_pause` after an empty receive, doubling up to `empty_pause_cap`, and waits
    `probe_wait` for a message when it is idle. A message without a permit is hidden for `bounce`,
    doubling up to `bounce_cap`, and its queue rests for `cooldown`.

    Latencies are of one call of queue, permit store, task store and gateway. A short poll asks
    `partitions_asked` of a queue's `partitions`. At a graceful stop, calls get `grace` to end.

    Raises ValueError for a field out of its bounds.
    """

    name: str
    slots: int
    batch: int
    empty_pause: float
    empty_pause_cap: float
    probe_wait: float
    bounce: float
    bounce_cap: float
    cooldown: float
    queue_latency: Latency
    permit_latency: Latency
    gateway: Latency
    partitions: int
    partitions_asked: int
    store_latency: Latency = NO_TIME
    visibility: float = 30.0
    permit_lease: float = 30.0
    heartbeat: float = 10.0
    discovery_interval: float = 10.0
    max_receives: int = 1_000
    grace: float = 60.0

    def __post_init__(self) -> None:
        check_kind("World.name", self.name, str, "a string")
        for name in ("slots", "partitions", "max_receives"):
            check_count(f"World.{name}", getattr(self, name))
        check_count("World.batch", self.batch, most=MAX_BATCH)
        check_count("World.partitions_asked", self.partitions_asked, most=self.partitions)
        for name in ("queue_latency", "permit_latency", "gateway", "store_latency"):
            check_kind(f"World.{name}", getattr(self, name), Latency, "a Latency")
        for name in ("probe_wait", "cooldown", "grace"):
            check_time(f"World.{name}", getattr(self, name))
        for name in ("empty_pause", "empty_pause_cap", "bounce", "bounce_cap"):
            check_time(f"World.{name}", getattr(self, name), least=INSTANT)
        for name, least in SHORTEST.items():
            check_time(f"World.{name}", getattr(self, name), least=least)

    def polling(self) -> Polling:
        """Return the polling of its workers' queues."""
        return Polling(
            batch=self.batch,
            wait=self.probe_wait,
            pause=self.empty_pause,
            pause_cap=self.empty_pause_cap,
        )

    def policy(self, name: str) -> PolicyFactory:
        """Return what makes a permit policy of its workers."""
        bounces = Bounces(first=self.bounce, longest=self.bounce_cap, cooldown=self.cooldown)
        return policy_factory(name, bounces)

    def settings(self) -> Settings:
        """Return the settings of its workers."""
        return Settings(
            log_level="error",
            workers=self.slots,
            permit_lease=self.permit_lease,
            visibility_timeout=self.visibility,
            heartbeat=self.heartbeat,
            discovery_interval=self.discovery_interval,
            max_receives=self.max_receives,
            shutdown_grace=self.grace,
            sweep_interval=NEVER,
            outbox_interval=NEVER,
        )


PUBLISHED = World(
    name="published",
    slots=50,
    batch=1,
    empty_pause=0.05,
    empty_pause_cap=0.05,
    probe_wait=0.0,
    bounce=0.2,
    bounce_cap=0.2,
    cooldown=0.0,
    queue_latency=Latency(0.003, 0.085),
    permit_latency=Latency(0.0005, 0.3),
    gateway=Latency(0.02),
    partitions=1,
    partitions_asked=1,
)
"""The published head-to-head: one worker whose slots ask for one message each.

Bounce, pauses and the queue's latency were fitted to the published receives; the spread of the
latencies keeps the slots from moving in step.
"""


REALISTIC = World(
    name="realistic",
    slots=50,
    batch=10,
    empty_pause=0.02,
    empty_pause_cap=5.0,
    probe_wait=5.0,
    bounce=0.2,
    bounce_cap=0.2,
    cooldown=0.0,
    queue_latency=Latency(0.01, 0.3),
    permit_latency=Latency(0.005, 0.3),
    gateway=Latency(2.0, 0.6),
    partitions=4,
    partitions_asked=2,
)
"""A cloud's queue and permit store, and a gateway whose calls differ.

The bounce was fitted: at 5 s all 20,000 messages of a job would soon be hidden, and that would
limit the receives.
"""


REALISTIC_COOL = replace(
    REALISTIC, name="realistic-cool", bounce=5.0, bounce_cap=300.0, cooldown=1.0
)
"""The same with the measure that reduced amplification in the published design: bounced messages
are hidden for longer and longer, and their queue rests."""


WORLDS = {world.name: world for world in (PUBLISHED, REALISTIC, REALISTIC_COOL)}
