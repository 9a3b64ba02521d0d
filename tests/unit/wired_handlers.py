"""Handlers over a whole binding, as bootstrap wires them."""

from __future__ import annotations

from conveyor.domain.api_keys import KeySealer
from conveyor.domain.hosts import HostPolicies
from conveyor.domain.signatures import SigningKeySealer
from conveyor.handlers.callbacks import StateMachines
from conveyor.handlers.delete import DeleteHandler
from conveyor.handlers.deliver import Deliverer, DeliveryPorts
from conveyor.handlers.export import ExportHandler
from conveyor.handlers.fire import Scheduler, SchedulerOptions, SchedulerPorts
from conveyor.handlers.ingest import IngestHandler
from conveyor.handlers.notify import Notifier
from conveyor.handlers.refusals import HostAnswers
from conveyor.handlers.retry_policy import RetryPolicy
from conveyor.handlers.settle import EventSettler
from conveyor.handlers.sweep import Sweeper, SweepOptions, SweepPorts
from conveyor.handlers.task import TaskHandler, TaskOptions, TaskPorts
from conveyor.ports.binding import Binding
from conveyor.ports.clock import Clock
from conveyor.ports.gateway import Gateway
from conveyor.ports.handler import AttemptObserver, Observer
from conveyor.ports.outbox import Subscriber
from conveyor.ports.pipeline import Pipeline
from conveyor.ports.webhooks import Webhooks
from conveyor.records.job_templates import JobTemplates
from conveyor.records.signed_events import EventSigner
from conveyor.records.task_sending import TaskSender
from conveyor.service.context import NO_LIMITS


def task_handler(
    binding: Binding,
    gateway: Gateway,
    clock: Clock,
    *,
    retry_policy: RetryPolicy,
    observer: Observer,
    max_interruptions: int,
    pipeline: Pipeline | None = None,
    pack_bodies: bool = False,
    hosts: HostAnswers | None = None,
) -> TaskHandler:
    """Make a handler of task messages."""
    ports = TaskPorts(
        tasks=binding.tasks,
        runs=binding.runs,
        blobs=binding.blobs,
        queues=binding.queues,
        signals=binding.signals,
        gateway=gateway,
        pipeline=pipeline,
        hosts=hosts,
    )
    return TaskHandler(
        ports,
        JobTemplates(binding.jobs, KeySealer([binding.root_secret])),
        clock,
        retry_policy=retry_policy,
        observer=observer,
        options=TaskOptions(
            worker="worker",
            visibility=60.0,
            gateway_timeout=60.0,
            max_result_bytes=1_000,
            max_interruptions=max_interruptions,
            pack_bodies=pack_bodies,
        ),
    )


def delete_handler(binding: Binding, clock: Clock, *, visibility: float) -> DeleteHandler:
    """Make a handler of delete messages."""
    return DeleteHandler(
        clock,
        jobs=binding.jobs,
        runs=binding.runs,
        tasks=binding.tasks,
        blobs=binding.blobs,
        queues=binding.queues,
        visibility=visibility,
    )


def ingest_handler(
    binding: Binding, clock: Clock, policies: HostPolicies = NO_LIMITS
) -> IngestHandler:
    """Make a handler of ingest messages."""
    return IngestHandler(
        clock,
        ingestion=binding.ingestion,
        blobs=binding.blobs,
        queues=binding.queues,
        signals=binding.signals,
        sender=task_sender(binding, clock, policies),
    )


def task_sender(binding: Binding, clock: Clock, policies: HostPolicies = NO_LIMITS) -> TaskSender:
    """Make a sender of references."""
    return TaskSender(binding.queues, binding.runs, binding.tasks, policies, clock)


def export_handler(binding: Binding, clock: Clock, *, max_bytes: int) -> ExportHandler:
    """Make a handler of export messages."""
    return ExportHandler(
        clock,
        exports=binding.exports,
        jobs=binding.jobs,
        tasks=binding.tasks,
        blobs=binding.blobs,
        queues=binding.queues,
        max_bytes=max_bytes,
    )


def notifier(
    binding: Binding, clock: Clock, *, observer: Observer, heartbeat: float, origin: str = ""
) -> Notifier:
    """Make a notifier, which looks at live runs with webhooks once in a heartbeat."""
    machines = StateMachines(
        clock,
        outbox=binding.outbox,
        callbacks=binding.callbacks,
        jobs=binding.jobs,
        observer=observer,
        heartbeat=heartbeat,
    )
    events = EventSettler(
        clock,
        outbox=binding.outbox,
        deliveries=binding.deliveries,
        jobs=binding.jobs,
        interval=heartbeat,
        origin=origin,
    )
    tellers = {Subscriber.CALLBACK: machines.tell, Subscriber.WEBHOOK: events.tell}
    return Notifier(clock, outbox=binding.outbox, tellers=tellers)


def deliverer(
    binding: Binding, clock: Clock, webhooks: Webhooks, *, observer: AttemptObserver
) -> Deliverer:
    """Make a deliverer."""
    ports = DeliveryPorts(
        deliveries=binding.deliveries,
        jobs=binding.jobs,
        runs=binding.runs,
        webhooks=webhooks,
        signer=EventSigner(binding.signing_keys, SigningKeySealer([binding.root_secret]), clock),
    )
    return Deliverer(ports, clock, observer=observer)


def sweeper(binding: Binding, clock: Clock, *, options: SweepOptions) -> Sweeper:
    """Make a sweeper."""
    ports = SweepPorts(
        sweeping=binding.sweeping,
        ingestion=binding.ingestion,
        exports=binding.exports,
        inputs=binding.inputs,
        deliveries=binding.deliveries,
        schedules=binding.schedules,
        jobs=binding.jobs,
        runs=binding.runs,
        blobs=binding.blobs,
        queues=binding.queues,
        signals=binding.signals,
        sender=task_sender(binding, clock),
    )
    return Sweeper(ports, clock, options=options)


def scheduler(
    binding: Binding, clock: Clock, *, sealer: KeySealer, options: SchedulerOptions
) -> Scheduler:
    """Make a scheduler."""
    ports = SchedulerPorts(
        schedules=binding.schedules,
        jobs=binding.jobs,
        runs=binding.runs,
        queues=binding.queues,
        signals=binding.signals,
        sealer=sealer,
    )
    return Scheduler(ports, clock, options=options)
