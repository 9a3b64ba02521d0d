"""The whole service: the one object that HTTP calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from conveyor.aio.outages import Outage
from conveyor.domain.hosts import HostPolicies
from conveyor.domain.submission import Limits
from conveyor.ports.clock import Clock
from conveyor.ports.webhooks import Webhooks
from conveyor.records.signed_events import EventSigner
from conveyor.records.task_sending import TaskSender
from conveyor.service.callers import Caller, Keyring, derive_keyring, identify
from conveyor.service.context import NO_LIMITS, ApiPorts, Context, MovedTime, ServiceOptions
from conveyor.service.dead_letters import OperatorLetters
from conveyor.service.deliveries import DeliveryQueries, DeliveryReplays
from conveyor.service.exports import RunExports
from conveyor.service.failures import Failures
from conveyor.service.file_inputs import FileInputs
from conveyor.service.hosts import HostQueries
from conveyor.service.idempotency import IdempotentRequests
from conveyor.service.jobs import JobCommands, JobQueries
from conveyor.service.links import ExportLinks, LinkSigner, UploadSigner
from conveyor.service.notifier import WorkNotifier
from conveyor.service.overview import Overviews
from conveyor.service.progress import Progress
from conveyor.service.reruns import Reruns
from conveyor.service.results import Cursors, Results
from conveyor.service.schedules import JobSchedules
from conveyor.service.sign_ins import SignIns
from conveyor.service.signing_keys import KeyRotations
from conveyor.service.submit import Additions, Submissions
from conveyor.service.waiting import RunWaits
from conveyor.service.webhooks import JobWebhooks, ReceiverCheck, WebhookTests


def _limits(options: ServiceOptions) -> Limits:
    return Limits(
        max_inline_tasks=options.max_inline_tasks,
        max_add_tasks=options.max_add_tasks,
        max_open_job_tasks=options.max_open_job_tasks,
    )


def _keyring(ports: ApiPorts, options: ServiceOptions) -> Keyring:
    return derive_keyring([ports.root_secret, *options.older_secrets], ports.sealing_secrets)


def _context(
    ports: ApiPorts,
    options: ServiceOptions,
    clock: Clock,
    keyring: Keyring,
    outages: Callable[[], Sequence[Outage]],
    moved: MovedTime | None,
    policies: HostPolicies,
) -> Context:
    return Context(
        jobs=ports.jobs,
        runs=ports.runs,
        tasks=ports.tasks,
        inputs=ports.inputs,
        exports=ports.exports,
        deliveries=ports.deliveries,
        schedules=ports.schedules,
        blobs=ports.blobs,
        pacing=ports.pacing,
        workers=ports.workers,
        clock=clock,
        options=options,
        keyring=keyring,
        waits=_waits(ports, options, clock, moved),
        policies=policies,
        outages=outages,
        moved=moved,
    )


def _waits(
    ports: ApiPorts, options: ServiceOptions, clock: Clock, moved: MovedTime | None
) -> RunWaits:
    if moved is None:
        return RunWaits(ports.workers, clock, heartbeat=options.heartbeat)
    return RunWaits(ports.workers, clock, heartbeat=options.heartbeat, run_shown=moved.run_shown)


def _signer(
    ports: ApiPorts, clock: Clock, keyring: Keyring, moved: MovedTime | None
) -> EventSigner:
    # A receiver judges a signature by the clock of its own machine.
    machine = clock if moved is None else moved.machine
    return EventSigner(ports.signing_keys, keyring.signing, machine)


def _notifier(ports: ApiPorts, policies: HostPolicies, clock: Clock) -> WorkNotifier:
    sender = TaskSender(ports.queues, ports.runs, ports.tasks, policies, clock)
    return WorkNotifier(ports.queues, ports.signals, ports.tasks, sender)


def _once(ports: ApiPorts, options: ServiceOptions, clock: Clock) -> IdempotentRequests:
    claim, ttl = options.idempotency_claim, options.idempotency_ttl
    return IdempotentRequests(ports.idempotency, clock, claim=claim, ttl=ttl)


class Service:
    """The operations of the API, grouped by subject.

    `submissions` and `additions` take in tasks, `reruns` replays them, `lifecycle` changes states,
    `listing` reads jobs and runs, `results` reads results, `failures` groups the failed ones,
    `hosts` counts the tasks of runs by host, `inputs` takes files of tasks, `exports` makes
    archives of results, `rotations` changes signing keys, `webhooks` sets the webhooks of jobs,
    `webhook_tests` tests receivers, `deliveries` reads the log of events, `replays` sends some
    again, `schedules` shows and changes schedules, `sign_ins` lets people into pages, `overviews`
    reads pages, `letters` shows operators the dead ones, `progress` follows runs for streams.
    `outages` tells what the worker of this process waits for. `policies` are the limits of hosts.
    `moved` is given where the clock is moved by hand.
    """

    def __init__(
        self,
        ports: ApiPorts,
        options: ServiceOptions,
        clock: Clock,
        *,
        webhooks: Webhooks,
        outages: Callable[[], Sequence[Outage]] = tuple,
        moved: MovedTime | None = None,
        policies: HostPolicies = NO_LIMITS,
    ) -> None:
        self.options, self._keyring = options, _keyring(ports, options)
        origin = options.public_origin
        context = _context(ports, options, clock, self._keyring, outages, moved, policies)
        notifier = _notifier(ports, policies, clock)
        once, cursors = _once(ports, options, clock), Cursors(self._keyring.cursors)
        links = LinkSigner(self._keyring.links, origin=origin)
        signer = _signer(ports, clock, self._keyring, moved)
        receivers = ReceiverCheck(webhooks, signer)
        self.submissions = Submissions(
            context, notifier=notifier, once=once, limits=_limits(options), receivers=receivers
        )
        self.additions = Additions(context, notifier=notifier, once=once, limits=_limits(options))
        self.reruns = Reruns(context, notifier, once)
        self.lifecycle = JobCommands(context, notifier)
        self.listing = JobQueries(context, cursors)
        self.results = Results(context, cursors, links)
        self.failures = Failures(context)
        self.hosts = HostQueries(context)
        self.inputs = FileInputs(context, UploadSigner(self._keyring.uploads, origin=origin))
        downloads = ExportLinks(self._keyring.exports, origin=origin)
        self.exports = RunExports(context, downloads, notifier)
        self.rotations = KeyRotations(ports.signing_keys, self._keyring.signing, clock)
        self.webhooks = JobWebhooks(context, receivers)
        self.webhook_tests = WebhookTests(context, webhooks, receivers, signer)
        self.deliveries = DeliveryQueries(context, cursors, signer)
        self.replays = DeliveryReplays(context, once)
        self.schedules = JobSchedules(context, cursors)
        self.overviews = Overviews(
            context,
            cursors,
            links=links,
            failures=self.failures,
            deliveries=self.deliveries,
            schedules=self.schedules,
            exports=self.exports,
        )
        self.sign_ins = SignIns(self._keyring, clock)
        self.letters = OperatorLetters(ports.dead_letters, cursors)
        self.progress = Progress(context, self.listing.show, ports.run_writes)

    def identify(self, api_key: str | None) -> Caller:
        """Return the caller that an API key stands for. Raises ConveyorError(unauthenticated)."""
        return identify(api_key, self._keyring)
