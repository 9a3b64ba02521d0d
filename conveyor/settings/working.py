"""Settings of what a worker does at a time, renews, and tries again."""

from __future__ import annotations

from conveyor.settings.row import DEVELOPMENT, WORKERS, Setting
from conveyor.settings.validators import (
    HOUR,
    MOST_VISIBILITY,
    at_least,
    between,
    host_rate,
    lasting,
)

WORKING: tuple[Setting, ...] = (
    Setting(
        "workers",
        "calls",
        "gateway calls at a time in this process, 1 to 10,000",
        between(1, 10_000),
        used_by=WORKERS,
    ),
    Setting(
        "permit_lease",
        "seconds",
        "after which the permits of a silent worker expire, 5 to 3,600",
        lasting(5, HOUR),
    ),
    Setting(
        "visibility_timeout",
        "seconds",
        "how long a received message and a claim stay reserved, 43,200 at most",
        lasting(1, MOST_VISIBILITY),
        used_by=WORKERS,
    ),
    Setting(
        "heartbeat",
        "seconds",
        "between renewals of claims, messages and permits",
        lasting(0.1, HOUR),
        used_by=WORKERS,
    ),
    Setting(
        "discovery_interval",
        "seconds",
        "between looks for changed runs",
        lasting(0.1, HOUR),
        used_by=WORKERS,
    ),
    Setting(
        "resync_interval",
        "seconds",
        "between looks at every run with work",
        lasting(0.1),
        used_by=WORKERS,
    ),
    Setting(
        "evict_after",
        "seconds",
        "after which an empty queue is no longer polled",
        lasting(1),
        used_by=WORKERS,
    ),
    Setting(
        "run_workers",
        "workers",
        "of the fleet that serve a run at least: more where its `max_inflight` needs them, 0: all",
        at_least(0),
        used_by="conveyor worker",
    ),
    Setting(
        "caller_max_inflight",
        "calls",
        "in flight at a time for all jobs of one caller, over the fleet, 0 for no limit",
        at_least(0),
        used_by=WORKERS,
    ),
    Setting(
        "host_limit",
        "calls",
        "in flight at a time to one host, over all jobs and workers, up to 1,000, 0 for no limit",
        between(0, 1_000),
    ),
    Setting(
        "host_rate",
        "calls a second",
        "that begin to one host, over all jobs and workers, 0.01 to 1,000, 0 for no limit",
        host_rate,
    ),
    Setting(
        "hosts",
        "path",
        "of a TOML file of patterns of hosts with limits of their own",
    ),
    Setting(
        "max_receives",
        "receives",
        "after which a message goes to the dead-letter queue, 3 to 1,000",
        between(3, 1_000),
    ),
    Setting(
        "queue_window",
        "references",
        "that the queue of a run holds in memory",
        at_least(10),
        used_by=DEVELOPMENT,
    ),
    Setting(
        "gateway_timeout",
        "seconds",
        "how long one gateway call may take, its body included",
        lasting(0.1),
        used_by=WORKERS,
    ),
    Setting(
        "shutdown_grace",
        "seconds",
        "how long running calls may take to end at shutdown",
        lasting(0),
        production=25.0,
    ),
    Setting(
        "retry_base",
        "seconds",
        "before the first retry; doubles from there",
        lasting(0),
        used_by=WORKERS,
    ),
    Setting(
        "retry_cap",
        "seconds",
        "longest backoff between two attempts, before jitter",
        lasting(0),
        used_by=WORKERS,
    ),
    Setting(
        "retry_after_cap", "seconds", "longest Retry-After to obey", lasting(0), used_by=WORKERS
    ),
    Setting(
        "rate_limit_deadline",
        "seconds",
        "after a task's first refusal in a row, from which on a further one fails it",
        lasting(0),
        used_by=WORKERS,
    ),
    Setting(
        "max_interruptions",
        "claims",
        "that may lapse before a task fails",
        at_least(1),
        used_by=WORKERS,
    ),
)
