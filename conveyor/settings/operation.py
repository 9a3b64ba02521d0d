"""Settings of operation: looks at what is due, how long records are kept, what is told."""

from __future__ import annotations

from conveyor.settings.row import WORKERS, Setting
from conveyor.settings.validators import HOUR, MOST_DAYS, between, lasting, origin

OPERATION: tuple[Setting, ...] = (
    Setting(
        "sweep_interval",
        "seconds",
        "between sweeps for leftovers",
        lasting(0.1, HOUR),
        used_by=WORKERS,
    ),
    Setting(
        "quiet_after",
        "seconds",
        "without progress, after which the sweeper revives a run, an export or a deletion",
        lasting(1),
        used_by=WORKERS,
    ),
    Setting(
        "outbox_interval",
        "seconds",
        "between looks for due callbacks, and for due deliveries",
        lasting(0.1, HOUR),
        used_by=WORKERS,
    ),
    Setting(
        "callback_heartbeat",
        "seconds",
        "between heartbeats to the state machine waiting for a run",
        lasting(1, HOUR),
        used_by=WORKERS,
    ),
    Setting(
        "schedule_interval",
        "seconds",
        "between looks for schedules that are due to fire",
        lasting(0.1, HOUR),
        used_by=WORKERS,
    ),
    Setting(
        "schedule_catch_up",
        "seconds",
        "that the newest of the fires missed while no worker ran may be late and still run",
        lasting(0),
    ),
    Setting(
        "row_retention_days",
        "days",
        "that an ended run is kept beyond its last result; 0 keeps it",
        lasting(0, MOST_DAYS),
        used_by=WORKERS,
    ),
    Setting(
        "delivery_retention_days",
        "days",
        "that the delivery of an event is kept after its last change, unless it is pending",
        lasting(1, MOST_DAYS),
        used_by=WORKERS,
    ),
    Setting(
        "fire_retention_days",
        "days",
        "that the record of a schedule's fire is kept after its last change",
        lasting(1, MOST_DAYS),
    ),
    Setting(
        "otlp_endpoint",
        "URL",
        "of a collector of traces (OTLP over HTTP); without one nothing is traced",
        origin,
    ),
    Setting(
        "trace_ratio",
        "share",
        "of tasks, messages and reading requests that are traced, 0 to 1",
        between(0, 1),
    ),
    Setting(
        "task_log_ratio",
        "share",
        "of tasks that ended well of which a line is logged, 0 to 1; failures are always logged",
        between(0, 1),
        used_by=WORKERS,
    ),
)
