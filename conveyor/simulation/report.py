"""The report of a simulation, from the counts of a fleet's services, and its fingerprint.

The fingerprint of all events is equal for two runs that did the same at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass

ROW = (
    "world",
    "policy",
    "permit_store",
    "workers",
    "cap",
    "tasks",
    "window_s",
    "completed",
    "receives",
    "amplification",
    "receive_calls_per_task",
    "empty_receives",
    "bounces",
    "permit_calls_per_task",
    "elapsed_s",
    "utilisation",
    "utilisation_steady",
    "peak_in_flight",
    "seconds_over_cap",
    "duplicates",
    "dead_lettered",
    "seed",
    "trace_hash",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The figures of one simulation, over all its jobs. Times are virtual seconds.

    `cap` is the sum of the jobs' caps. `receives` counts messages received, `amplification` the
    same per ended task, `receive_calls_per_task` receive calls of runs' queues, empty ones
    included. `utilisation` is the mean number of gateway calls in flight as a part of `cap`,
    `utilisation_steady` the same until the last task was first started; for a simulation that was
    not cut off, that leaves out the tail. `seconds_over_cap` adds up each job's time over its own
    cap. `duplicates` counts work done for tasks whose claim had been lost.

    `lost` tasks have not ended and no message names them; `counted_twice` tasks ended more than
    once. `in_hand` messages are received and not settled at the end, `peak_received` is the most of
    them. `peak_granted` is the most permits of one job at any write of the permit store,
    `granted_over` the most above its cap. `unreached` calls found no gateway. `abandoned` calls
    belong to processes paused until their permits lapsed, `fenced` ones were cut off by their
    worker. `lanes` are the runs that each worker serves at the end. `peaks` are the most calls in
    flight of each job, `host_peak` those of any host, `host_starts` the most calls that began to
    one host in a second shortened by 0.1; `host_use` is the mean part that hosts with several calls
    had of their limit or rate, whichever was closer; `uninvited` calls began to hosts that were
    closed. `most_received` is the most times that one message was received. `finished_at` is the
    end of each job, None if it has not ended, in the order of the plans, as `peaks` are. `events`
    counts the events in the trace.
    """

    world: str
    policy: str
    permit_store: str
    workers: int
    cap: int
    tasks: int
    window_s: float | None
    completed: int
    receives: int
    amplification: float
    receive_calls_per_task: float
    empty_receives: int
    bounces: int
    permit_calls_per_task: float
    elapsed_s: float
    utilisation: float
    utilisation_steady: float
    peak_in_flight: int
    seconds_over_cap: float
    duplicates: int
    dead_lettered: int
    seed: int
    trace_hash: str
    lost: int
    counted_twice: int
    in_hand: int
    peak_received: int
    peak_granted: int
    granted_over: int
    permit_calls: int
    receive_calls: int
    gateway_calls: int
    throttled: int
    unreached: int
    abandoned: int
    fenced: int
    peaks: tuple[int, ...]
    host_peak: int
    host_starts: int
    host_use: float
    most_received: int
    uninvited: int
    lanes: tuple[int, ...]
    finished_at: tuple[float | None, ...]
    events: int

    def row(self) -> dict[str, str | int | float | None]:
        """Return the figures of a benchmark's row, in its order, for JSON."""
        return {name: getattr(self, name) for name in ROW}

    def of_hosts(self) -> dict[str, str | int | float | None]:
        """Return the figures of hosts, for JSON."""
        return {
            "host_peak": self.host_peak,
            "host_starts": self.host_starts,
            "host_use": round(self.host_use, 4),
        }
