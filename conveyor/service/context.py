"""The context of the service: the ports, options and keys of all its parts, and the lookup of jobs
and runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from conveyor.aio.outages import Outage
from conveyor.domain.errors import ConveyorError, ErrorCode, not_found
from conveyor.domain.hosts import HostPolicies, HostRules
from conveyor.domain.model import JobStatus, JobView, Run, RunStatus
from conveyor.ports.binding import Jobs
from conveyor.ports.blobs import Blobs
from conveyor.ports.clock import Clock
from conveyor.ports.dead_letters import DeadLetterQueue
from conveyor.ports.deliveries import DeliveryLog
from conveyor.ports.exports import ExportRequests
from conveyor.ports.idle import OpenWork
from conveyor.ports.inputs import InputSlots
from conveyor.ports.pacing import Pacing
from conveyor.ports.queues import Queues, Signals
from conveyor.ports.records import ApiRuns, Idempotency, RunWrites
from conveyor.ports.schedules import Schedules
from conveyor.ports.signing_keys import SigningKeys
from conveyor.ports.tasks import TaskReader, UnfinishedTasks
from conveyor.ports.workers import Workers
from conveyor.service.callers import Keyring
from conveyor.service.waiting import RunWaits


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """Limits, lifetimes and the service's own address; plain values, named as their settings.

    Durations are seconds. `public_origin` is scheme, host and port (and a path prefix, if any) for
    signed links, with no slash at the end. `older_secrets` are root secrets in use before the
    present one, newest first: what they sealed and signed stays valid, and the last of all keeps
    naming callers. Without `heeds_robots` no worker would, and jobs that ask for it are refused.
    """

    public_origin: str
    max_inline_tasks: int = 100_000
    async_threshold: int = 10_000
    max_add_tasks: int = 10_000
    max_open_job_tasks: int = 100_000
    max_active_jobs: int = 0
    max_scheduled_jobs: int = 0
    schedule_catch_up: float = 604_800.0
    idempotency_claim: float = 60.0
    idempotency_ttl: float = 86_400.0
    result_url_ttl: float = 7_200.0
    partial_rerun_window_days: int = 10
    task_shard_count: int = 8
    shard_scheme: str = "stripe"
    max_input_rows: int = 100_000
    max_input_bytes: int = 52_428_800
    max_validation_seconds: float = 20.0
    input_upload_ttl: float = 1_800.0
    input_ttl: float = 86_400.0
    export_ttl: float = 43_200.0
    max_export_bytes: int = 107_374_182_400
    heartbeat: float = 10.0
    max_streams: int = 1_000
    max_caller_streams: int = 20
    heeds_robots: bool = True
    older_secrets: tuple[bytes, ...] = field(default=(), repr=False)


NO_LIMITS = HostPolicies(HostRules)


class ApiTasks(TaskReader, UnfinishedTasks, Protocol):
    """Tasks as the API reads them and fills queues from them."""


class ApiPorts(Protocol):
    """The roles and secrets that the service uses; a binding has them all."""

    @property
    def jobs(self) -> Jobs: ...

    @property
    def runs(self) -> ApiRuns: ...

    @property
    def tasks(self) -> ApiTasks: ...

    @property
    def idempotency(self) -> Idempotency: ...

    @property
    def inputs(self) -> InputSlots: ...

    @property
    def exports(self) -> ExportRequests: ...

    @property
    def signing_keys(self) -> SigningKeys: ...

    @property
    def deliveries(self) -> DeliveryLog: ...

    @property
    def schedules(self) -> Schedules: ...

    @property
    def blobs(self) -> Blobs: ...

    @property
    def pacing(self) -> Pacing: ...

    @property
    def queues(self) -> Queues: ...

    @property
    def signals(self) -> Signals: ...

    @property
    def workers(self) -> Workers: ...

    @property
    def run_writes(self) -> RunWrites | None: ...

    @property
    def dead_letters(self) -> DeadLetterQueue | None: ...

    @property
    def root_secret(self) -> bytes: ...

    @property
    def sealing_secrets(self) -> tuple[bytes, ...]: ...


@dataclass(frozen=True, slots=True)
class MovedTime:
    """The parts of a server whose clock is moved by hand: the `machine`'s own clock, the counter of
    open work, and a function to call with each run that is shown."""

    machine: Clock
    work: OpenWork
    run_shown: Callable[[Run], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The roles of the store, the clock, the options and the keys, the limits of hosts, what is
    away, and what runs wait for."""

    jobs: Jobs
    runs: ApiRuns
    tasks: TaskReader
    inputs: InputSlots
    exports: ExportRequests
    deliveries: DeliveryLog
    schedules: Schedules
    blobs: Blobs
    pacing: Pacing
    workers: Workers
    clock: Clock
    options: ServiceOptions
    keyring: Keyring
    waits: RunWaits
    policies: HostPolicies
    outages: Callable[[], Sequence[Outage]] = tuple
    moved: MovedTime | None = None

    def outage(self) -> Outage | None:
        """Return what the work of this process waits for, if it does: the first of several."""
        return next(iter(self.outages()), None)

    async def live_job(self, caller_id: str, job_id: str) -> JobView:
        """Return the caller's job. Raises ConveyorError(not_found), also where it is being
        deleted."""
        view = await self.jobs.get_job(caller_id, job_id)
        if view is None or view.job.status is JobStatus.DELETED:
            raise not_found("job")
        return view

    async def live_run(
        self, caller_id: str, job_id: str, run_id: str | None
    ) -> tuple[JobView, Run]:
        """Return the caller's job and one of its runs, the latest where `run_id` is None.

        Raises ConveyorError(not_found), also where one of them is being deleted.
        """
        view = await self.live_job(caller_id, job_id)
        run = view.latest_run
        if run_id is not None and (run is None or run.run_id != run_id):
            run = await self.runs.get_run(caller_id, job_id, run_id)
        if run is None or run.status is RunStatus.DELETED:
            raise not_found("run")
        return view, run


def template_is_fixed() -> ConveyorError:
    """Build the refusal to add tasks to a scheduled job, or to close it."""
    return ConveyorError(ErrorCode.JOB_NOT_OPEN, "the tasks of a scheduled job never change")
