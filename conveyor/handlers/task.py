"""Work tasks: claim them, call the gateway, store the bodies, settle. The last settlement ends the
run.

The call is one task's own. Over a binding with a pipeline, many tasks share the other steps.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import anyio
import msgspec
from cachetools import LRUCache

from conveyor.aio.outages import Outages
from conveyor.aio.resilience import HIDING, CircuitBreaker, log_and_continue, log_failure
from conveyor.domain.api_keys import UnsealError
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import (
    Event,
    StoredBody,
    Task,
    WaitReason,
)
from conveyor.domain.params import implied_format, merge
from conveyor.domain.states import LIVE_RUN_STATES
from conveyor.domain.task_rules import Deferred, Failed, Released, Retry, Settlement, Succeeded
from conveyor.domain.text_rules import logged_url
from conveyor.handlers.packs import BodyPacks, StoppableWrites
from conveyor.handlers.refusals import HostAnswers
from conveyor.handlers.retry_policy import (
    RetryPolicy,
    attempt_event,
    internal_failure,
    last_attempt,
    refused_body,
    trace_attributes,
    unreadable_key,
)
from conveyor.ports.blobs import BlobWriter, BodyRefused, Content
from conveyor.ports.clock import Clock
from conveyor.ports.gateway import (
    Absence,
    Gateway,
    Postponed,
    ScrapeFailed,
    ScrapeRequest,
    Shared,
    Success,
)
from conveyor.ports.handler import (
    ACKNOWLEDGE,
    NO_HOST_TURNS,
    Held,
    HostTurns,
    Observer,
    Outcome,
    ResultLost,
    StagedHandler,
    Throttled,
)
from conveyor.ports.pipeline import Pipeline
from conveyor.ports.queues import FIRST_VERSION, Delivery, Queues, Signals, TaskMessage
from conveyor.ports.records import WorkerRuns
from conveyor.ports.tasks import (
    Claim,
    Claimed,
    ClaimedElsewhere,
    ClaimRequest,
    Settled,
    SettleRequest,
    TaskClaims,
)
from conveyor.ports.tracing import NO_TRACER, Recording, Tracer, is_sampled
from conveyor.ports.workers import FleetPause
from conveyor.records.blob_keys import result_key
from conveyor.records.job_templates import JobTemplate, JobTemplates
from conveyor.wire.errors import is_shortage

SUSPECT_PAUSE = 0.2
"""Seconds until a task that may kill its worker asks again whether another such task is done."""
PATIENCE = 6
"""Calls for one message while the gateway refuses for load, before the message is hidden."""
PATIENT_PAUSE = 5.0
"""Longest pause, in seconds, that is waited for with the permit in hand."""

MOST_SUBMITS = 1_000
"""Runs whose submits are remembered for the links of traces."""

_log = logging.getLogger("conveyor.tasks")


class TaskOptions(msgspec.Struct, frozen=True):
    """The worker's name in claims, the length of a claim, and the bounds of work.

    Of tasks that ended well, the share `log_ratio` is logged; with `logs_urls` each by its URL.
    With `pack_bodies` small bodies of a run are stored together, where tasks are settled one by
    one.
    """

    worker: str
    visibility: float
    gateway_timeout: float
    max_result_bytes: int
    max_interruptions: int
    pack_bodies: bool = False
    log_ratio: float = 1.0
    logs_urls: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPorts:
    """The roles that working tasks uses. Without a `pipeline`, each task is claimed and settled by
    itself; without `hosts`, no host is heeded."""

    tasks: TaskClaims
    runs: WorkerRuns
    blobs: BlobWriter
    queues: Queues
    signals: Signals
    gateway: Gateway
    pipeline: Pipeline | None = None
    outages: Outages | None = None
    tracer: Tracer = NO_TRACER
    pause: FleetPause = field(default_factory=FleetPause)
    hosts: HostAnswers | None = None
    turns: HostTurns = NO_HOST_TURNS


@dataclass(slots=True, eq=False)
class ClaimedTask(Held):
    """A task in work, from its claim to its settlement. `trace` records it if it is sampled.

    `note` is that of its call in the ledger of calls, made at the monotonic time `called_at`. Once
    the gateway has answered, at the monotonic time `answered_at`, `settlement` is to be written,
    and before it `body` to be stored under `blob_key`, unless `stored` says that it is. `error`
    says what came in the way.
    """

    task: Task
    job_id: str
    receives: int
    note: int = -1
    started_at: int = 0
    called_at: float = 0.0
    answered_at: float | None = None
    template: JobTemplate | None = None
    settlement: Settlement = Released()
    blob_key: str = ""
    body: bytes | None = None
    stored: bool = False
    error: Exception | None = None
    trace: Recording | None = None

    def note_stored(self, key: str) -> None:
        """Note that the body lies under a key, which the row is to name."""
        self.stored, self.blob_key = True, key
        settlement = self.settlement
        if isinstance(settlement, Succeeded):
            result = msgspec.structs.replace(settlement.result, blob_key=key)
            self.settlement = Succeeded(settlement.event, result)


@dataclass(slots=True)
class _HeldClaim:
    """A claim of this process, by its number. It lapses at `until`."""

    number: int
    until: int


class TaskHandler(StagedHandler):
    """The handler of task messages."""

    def __init__(
        self,
        ports: TaskPorts,
        templates: JobTemplates,
        clock: Clock,
        *,
        retry_policy: RetryPolicy,
        observer: Observer,
        options: TaskOptions,
    ) -> None:
        self._tasks = ports.tasks
        self._runs = ports.runs
        self._blobs = StoppableWrites(ports.blobs, clock)
        self._queues = ports.queues
        self._signals = ports.signals
        self._gateway = ports.gateway
        self._pipeline = ports.pipeline
        self._tracer = ports.tracer
        self._pause = ports.pause
        self._hosts = ports.hosts
        self._turns = ports.turns
        self._submits: LRUCache[str, str] = LRUCache(MOST_SUBMITS)
        self._templates = templates
        self._clock = clock
        self._retry_policy = retry_policy
        self._observer = observer
        self._options = options
        self._claims: dict[tuple[str, str], _HeldClaim] = {}
        self._not_undone: list[ClaimedTask] = []
        self._has_suspect = False
        self._calls = 0
        self._outages = ports.outages or Outages(clock)
        self._breaker = CircuitBreaker(clock, dependency="the result store")
        self._outages.tell_also(self._breaker.outage)
        self._packs: BodyPacks | None = None
        if options.pack_bodies and ports.pipeline is None:
            self._packs = BodyPacks(ports.blobs, clock, breaker=self._breaker, observer=observer)
        life = "" if ports.pipeline is None else f"{ports.pipeline.calls.life}/"
        self._name = f"{life}{options.worker}"

    @property
    def claims_at_once(self) -> int:
        return 1 if self._pipeline is None else self._pipeline.claims_at_once

    @property
    def gathers(self) -> bool:
        return self._packs is not None

    def hurry(self) -> None:
        self._blobs.stop()
        if self._packs is not None:
            self._packs.stop()

    async def handle(self, delivery: Delivery, throttled: Throttled) -> Outcome:
        """Work the task that a message names, if it can be claimed and its body stored.

        Raises ConveyorError(unavailable) if a port is down; ResultLost, which is such an error, if
        that showed after a call of the gateway.
        """
        if self._packs is not None and self._packs.keeps_some:
            raise ConveyorError(ErrorCode.UNAVAILABLE, "bodies wait for the result store")
        with self._breaker.guard():
            found = await self._claim(delivery)
            if isinstance(found, Outcome):
                return found
            return await self._work(found, throttled)

    async def begin(
        self, delivery: Delivery, throttled: Throttled, held: Held | None
    ) -> Held | Outcome:
        assert held is None or isinstance(held, ClaimedTask)
        if not self._breaker.is_closed:
            # Nothing but a trial call may be made, from its claim to its settlement.
            if held is not None:
                await self.undo([held])
            return await self.handle(delivery, throttled)
        found = held if held is not None else await self._claim(delivery)
        if isinstance(found, Outcome):
            return found
        if self._is_suspect(found.task):
            return await self._work(found, throttled)
        try:
            outcome = await self._call(found, throttled)
        except BaseException:
            await self._give_up(found)
            raise
        return found if outcome is None else outcome

    async def renew(self) -> None:
        """Extend the claims of tasks in work, once less than half of their time is left, and undo
        those that could not be undone."""
        now, lasting = self._clock.now(), int(self._options.visibility * 1000)
        due = {
            claimed: claim
            for claimed, claim in self._claims.items()
            if 2 * (claim.until - now) < lasting
        }
        if due:
            claims = [(run, task, claim.number) for (run, task), claim in due.items()]
            await self._tasks.renew_claims(claims, claimed_until=now + lasting)
            for claim in due.values():
                claim.until = now + lasting
        if self._not_undone:
            again, self._not_undone = self._not_undone, []
            await self._undo(again)

    # -- claims --

    async def _claim(self, delivery: Delivery) -> ClaimedTask | Outcome:
        [request] = self._claim_requests([delivery])
        try:
            claim = await self._tasks.claim_task(
                request.run_id,
                request.task_id,
                worker=request.worker,
                now=request.now,
                claimed_until=request.claimed_until,
                max_interruptions=request.max_interruptions,
            )
        except BaseException:
            # A cancelled claim may have been written all the same.
            with anyio.CancelScope(shield=True):
                await self._release(request)
            raise
        return self._claimed(delivery, request, claim)

    async def claim(self, deliveries: Sequence[Delivery]) -> list[Held | Outcome | None]:
        if self._pipeline is None or not self._breaker.is_closed:
            return [None] * len(deliveries)
        requests = self._claim_requests(deliveries)
        try:
            claims = await self._pipeline.tasks.claim_tasks(requests)
        except Exception as error:
            # Each is claimed by itself then, and meets the error by itself.
            claims = [error] * len(requests)
        except BaseException:
            with anyio.CancelScope(shield=True):
                for request in requests:
                    await self._release(request)
            raise
        found: list[Held | Outcome | None] = []
        for delivery, request, claim in zip(deliveries, requests, claims, strict=True):
            if isinstance(claim, Exception):
                release = partial(self._release, request)
                await log_and_continue(_log, "a claim was not undone", release)
                found.append(None)
            else:
                found.append(self._claimed(delivery, request, claim))
        return found

    def _claim_requests(self, deliveries: Sequence[Delivery]) -> list[ClaimRequest]:
        """Ask for claims in a name that no others have, so that undoing them never undoes another
        of the same worker."""
        self._calls += 1
        holder, now = f"{self._name}/{self._calls}", self._clock.now()
        until, most = now + int(self._options.visibility * 1000), self._options.max_interruptions
        messages = [delivery.message for delivery in deliveries]
        return [
            ClaimRequest(message.run_id, message.task_id, holder, now, until, most)
            for message in messages
            if isinstance(message, TaskMessage)
        ]

    def _claimed(
        self, delivery: Delivery, request: ClaimRequest, claim: Claim
    ) -> ClaimedTask | Outcome:
        message = delivery.message
        assert isinstance(message, TaskMessage)
        if isinstance(claim, Claimed):
            task = claim.task
            claimed = _HeldClaim(task.claim_number, request.claimed_until)
            self._claims[task.run_id, task.task_id] = claimed
            held = ClaimedTask(task, message.job_id, delivery.receive_count)
            held.trace = self._tracer.begin("attempt", task.task_id, started_at=request.now)
            if held.trace is not None:
                held.trace.part("claim", request.now, self._clock.now())
            return held
        if isinstance(claim, ClaimedElsewhere):
            later = claim.is_due_later
            return Outcome(
                hide_for=claim.hide_for(request.now, HIDING.delay(delivery.receive_count)),
                waiting=WaitReason.BACKOFF if later else None,
                is_claimed=not later,
            )
        if claim.run_status is not None:
            settled = Settled(True, claim.run_status)
            return self._ended(message, None, settled)
        return ACKNOWLEDGE

    async def _release(self, request: ClaimRequest) -> None:
        """Undo a claim of which nobody knows whether it was made."""
        await self._tasks.release_claim(request.run_id, request.task_id, worker=request.worker)

    async def undo(self, held: Sequence[Held]) -> None:
        tasks = [one for one in held if isinstance(one, ClaimedTask)]
        for one in tasks:
            self._observer.claim_undone()
            one.settlement = self._given_back(one)
        await self._undo(tasks)

    async def _undo(self, tasks: Sequence[ClaimedTask]) -> None:
        """Write that claims are undone, and remove their bodies. A claim whose call is noted in the
        ledger is tried again with each renewal, so that no note stays for ever."""
        for one, settled in zip(tasks, await self._settle_all(tasks), strict=True):
            undone = isinstance(settled, Settled)
            self._forget(one, ended=undone)
            if isinstance(settled, Exception):
                log_failure(_log, "a claim was not undone", settled)
                if one.note >= 0:
                    self._not_undone.append(one)
            elif settled.applied and one.stored:
                # Where this did not apply, a settlement before it may have: then its row names it.
                await self._discard(one)

    async def _discard(self, held: ClaimedTask) -> None:
        """Remove a stored body that no row will name."""
        remove = partial(self._remove, held.blob_key)
        await log_and_continue(_log, "a body that no row names was not removed", remove)

    async def _remove(self, key: str) -> None:
        await (self._blobs.delete if self._packs is None else self._packs.drop)(key)

    def _given_back(self, held: ClaimedTask) -> Released | Deferred:
        """Decide how a claim goes back: a row whose body was lost says why its message is hidden
        for so long. Its call was answered, so nothing refuses it any more."""
        if not isinstance(held.error, ResultLost):
            return Released()
        pause = HIDING.delay(held.receives)
        not_before = self._clock.now() + round(pause * 1000)
        return Deferred(not_before, WaitReason.OUTAGE)

    async def _give_up(self, held: ClaimedTask) -> None:
        """Give a claim back after an error or a cancellation, so that nobody has to wait until it
        lapses."""
        with anyio.CancelScope(shield=True):
            await self.undo([held])

    def _forget(self, held: ClaimedTask, *, ended: bool) -> None:
        """Renew a claim no longer. If it has `ended`, a boot need not know of its call either."""
        task = held.task
        self._claims.pop((task.run_id, task.task_id), None)
        if ended and self._pipeline is not None and held.note >= 0:
            self._pipeline.calls.end(held.note)
            held.note = -1

    def _is_suspect(self, task: Task) -> bool:
        """Return whether so many of its claims lapsed that the task itself may kill its workers."""
        return 2 * task.interruptions >= self._options.max_interruptions

    # -- all stages of one task --

    async def _work(self, held: ClaimedTask, throttled: Throttled) -> Outcome:
        """Work a claimed task from its call to its settlement; a suspect only while no other one is
        worked. A task that kills its worker also interrupts its neighbours, and they must not be
        interrupted as often as it is."""
        suspect = self._is_suspect(held.task)
        if suspect and self._has_suspect:
            await self._give_up(held)
            return Outcome(hide_for=SUSPECT_PAUSE)
        self._has_suspect = suspect or self._has_suspect
        try:
            outcome = await self._call(held, throttled)
            if outcome is not None:
                return outcome
            await self._store(held)
            self._count_success(held)
            settled = await self._settle(held)
            return self._note_settled(held, settled) or await self._after(held, settled)
        except BaseException:
            await self._give_up(held)
            raise
        finally:
            self._has_suspect = self._has_suspect and not suspect

    # -- the call --

    async def _call(self, held: ClaimedTask, throttled: Throttled) -> Outcome | None:
        """Call the gateway, and decide on the settlement; return the outcome if there is nothing
        left to settle."""
        held.started_at = self._clock.now()
        could_begin = max(held.task.created_at, held.task.not_before)
        self._observer.task_began((held.started_at - could_begin) / 1_000)
        if held.trace is not None:
            await self._link(held.trace, held.task.run_id)
        try:
            held.template = await self._templates.get(held.job_id)
        except UnsealError:
            failure = unreadable_key()
            event = self._event(held, failure)
            held.settlement = Failed(event, failure.problem, failure.failure)
            return None
        if held.template is None:
            self._forget(held, ended=False)
            return ACKNOWLEDGE
        if self._pipeline is not None:
            task = held.task
            held.note = self._pipeline.calls.begin(task.run_id, task.task_id, task.claim_number)
        try:
            held.settlement = await self._scrape_patiently(held, held.template, throttled)
        except ScrapeFailed as failure:
            if failure.account is not None:
                return await self._refused(held, failure)
            if self._hosts is not None and held.template is not None:
                await self._hosts.heed(held.template.job, failure, began=held.called_at)
            held.settlement = self._verdict(held, failure)
        finally:
            held.answered_at = self._clock.monotonic()
            if held.trace is not None:
                held.trace.part("gateway", held.started_at, self._clock.now())
        return None

    async def _link(self, trace: Recording, run_id: str) -> None:
        """Link a trace to the request or the fire that made the run, if that was traced."""
        if run_id not in self._submits:
            run = await self._runs.dispatchable_run(run_id)
            self._submits[run_id] = "" if run is None else run.traceparent or ""
        trace.link(self._submits[run_id])

    async def _scrape_patiently(
        self, held: ClaimedTask, template: JobTemplate, throttled: Throttled
    ) -> Succeeded:
        """Scrape; while the gateway refuses for load, wait with the permit in hand, so that the
        message need not be received again. Raises ScrapeFailed."""
        task, refused_at = held.task, 0
        for call in itertools.count(1):
            try:
                return await self._scrape(held, template)
            except ScrapeFailed as failure:
                self._outages.judge(failure)
                if failure.burns_attempt or failure.is_spared or isinstance(failure, Postponed):
                    raise
                throttled()
                refused_at = failure.waits_since = refused_at or self._clock.now()
                pause = self._retry_policy.pause(failure, task, call, began=held.started_at)
                if call >= PATIENCE or pause is None or pause > PATIENT_PAUSE:
                    raise
                self._observer.gateway_called("retry")
                await self._clock.sleep(pause)
                if self._pause.since is not None:
                    raise
                if await self._runs.dispatchable_run(task.run_id) is None:
                    raise
        raise AssertionError("unreachable")

    async def _scrape(self, held: ClaimedTask, template: JobTemplate) -> Succeeded:
        """Make one call. A small body is kept in hand, a large one stored as it arrives."""
        job, task = template.job, held.task
        request = self._request(task, template)
        held.blob_key = result_key(
            job.job_id, task.run_id, task.task_id, task.claim_number, template.lifecycle_days
        )
        if self._outages.awaits_answer:
            self._outages.admit()
        asked = None
        if self._hosts is not None and request.heeds_robots:
            asked = await self._hosts.admit(job, request)
        await self._turns.come(task.run_id, task.task_id, task.spec.url, asked)
        began, outcome = self._clock.monotonic(), "failed"
        held.called_at = began
        try:
            async with self._gateway.scrape(request) as success:
                if self._outages.awaits_answer:
                    self._outages.heard()
                content = success.content
                if isinstance(content, bytes):
                    held.body, size = content, len(content)
                else:
                    size = await self._put(held, content)
            outcome = "successful"
            if self._hosts is not None and success.refusal is not None:
                await self._hosts.refused(job, success.refusal, began)
            elif self._hosts is not None and self._turns.is_lowered(task.run_id, task.task_id):
                await self._hosts.served(job, request.url)
        except (ScrapeFailed, ConveyorError):
            raise
        except Exception as error:
            raise self._broken_off(held, error) from None
        finally:
            trace = "" if held.trace is None else held.trace.traceparent
            took = self._clock.monotonic() - began
            self._observer.gateway_took(took, outcome, traceparent=trace)
        result = StoredBody(
            blob_key=held.blob_key,
            size=size,
            content_type=success.content_type,
            format=implied_format(request.params) if task.spec.params else job.format,
        )
        return Succeeded(self._event(held, success), result)

    def _request(self, task: Task, template: JobTemplate) -> ScrapeRequest:
        job = template.job
        return ScrapeRequest(
            url=task.spec.url,
            api_key=template.api_key,
            method=task.spec.method,
            body=task.spec.body,
            params=merge(job.params, task.spec.params) if task.spec.params else job.params,
            timeout=self._options.gateway_timeout,
            max_bytes=self._options.max_result_bytes,
            order=task.index,
            has_waited=task.not_before > 0,
            guard=None if self._hosts is None else self._hosts.guard(job, task.spec.url),
            heeds_robots=job.politeness is not None and job.politeness.robots,
        )

    def _event(self, held: ClaimedTask, ended: Success | ScrapeFailed) -> Event:
        now = self._clock.now()
        return attempt_event(held.task, ended, started_at=held.started_at, ended_at=now)

    def _broken_off(self, held: ClaimedTask, error: Exception) -> ScrapeFailed:
        """Return the failure of a call that an error of our own ended: no answer, and no fault of
        the task if this process has nothing left to call with."""
        failed = self._unexpected(held)
        failed.absence = Absence(Shared.PROCESS) if is_shortage(error) else Absence()
        return failed

    def _unexpected(self, held: ClaimedTask) -> ScrapeFailed:
        _log.exception("an attempt failed unexpectedly", extra={"task_id": held.task.task_id})
        return internal_failure()

    def _verdict(self, held: ClaimedTask, failure: ScrapeFailed) -> Failed | Retry | Deferred:
        """Decide what a failure means, and count the call."""
        assert held.template is not None  # no call is made without one
        verdict = self._retry_policy.decide(
            failure,
            held.task,
            held.template.job,
            event=self._event(held, failure),
            receives=held.receives,
        )
        if failure.is_spared:
            self._outages.ended(by_deadline=isinstance(verdict, Failed))
        if not isinstance(verdict, Deferred) and (failure.sent or not failure.is_spared):
            self._observer.gateway_called("retry" if isinstance(verdict, Retry) else "failed")
        return verdict

    async def _refused(self, held: ClaimedTask, failure: ScrapeFailed) -> Outcome:
        """End the run of an account that the gateway refused; the task is as if never tried."""
        assert failure.account is not None
        self._observer.gateway_called("refused")
        run_id = held.task.run_id
        detail = failure.problem.detail or failure.problem.title
        await self._runs.fail_run(
            run_id, reason=failure.account, detail=detail[:500], now=self._clock.now()
        )
        self._signals.run_halted(run_id)
        held.settlement = Released()
        await self._settle(held)
        self._forget(held, ended=True)
        return self._run_ended(run_id)

    # -- bodies --

    async def _store(self, held: ClaimedTask, packs: BodyPacks | None = None) -> None:
        """Store the body in hand, in `packs` with others. Raises ResultLost."""
        if held.body is None:
            return
        began = self._clock.now()
        try:
            if packs is None:
                await self._put(held, held.body)
            else:
                await self._pack(held, held.body, packs)
        except ScrapeFailed as failure:
            self._fail_answered(held, failure)
        except ConveyorError:
            raise
        except Exception:
            self._fail_answered(held, self._unexpected(held))
        finally:
            self._trace([held], "body", began)

    def _trace(self, tasks: Sequence[ClaimedTask], part: str, began: int) -> None:
        """Add a part that ends now to the traces of tasks that are sampled."""
        for held in tasks:
            if held.trace is not None:
                held.trace.part(part, began, self._clock.now())

    async def _put(self, held: ClaimedTask, content: Content) -> int:
        """Store a body; return its size. Raises ScrapeFailed, ResultLost."""
        try:
            size = await self._blobs.put(held.blob_key, content)
        except ConveyorError as error:
            meaning = self._unkept(error)
            if isinstance(meaning, ResultLost):
                held.error = meaning
            raise meaning from error
        held.stored = True
        self._breaker.succeeded()
        return size

    async def _pack(self, held: ClaimedTask, body: bytes, packs: BodyPacks) -> None:
        """Store a body with others of its run. Raises ScrapeFailed, ResultLost."""
        try:
            held.note_stored(await packs.put(held.blob_key, body))
        except ConveyorError as error:
            meaning = _meaning(error)
            if isinstance(meaning, ResultLost):
                held.error = meaning
            raise meaning from error

    def _unkept(self, error: ConveyorError) -> ScrapeFailed | ResultLost:
        """Tell the breaker, and return what the loss of a body means."""
        if isinstance(error, BodyRefused):
            # The store works, and would keep another body.
            self._breaker.succeeded()
        else:
            self._breaker.failed(error.detail)
        return _meaning(error)

    async def _store_all(self, pipeline: Pipeline, answered: Sequence[ClaimedTask]) -> None:
        """Store the bodies in hand, and note for each task the error that came in the way."""
        full = [held for held in answered if held.body is not None]
        if not full:
            return
        bodies = [(held.blob_key, held.body) for held in full if held.body is not None]
        began = self._clock.now()
        stored = await pipeline.bodies.put_new(bodies)
        self._trace(full, "body", began)
        for held, found in zip(full, stored, strict=True):
            if isinstance(found, str):
                held.note_stored(found)
                self._breaker.succeeded()
                continue
            meaning = self._unkept(found) if isinstance(found, ConveyorError) else found
            if isinstance(meaning, ResultLost):
                held.error = meaning
                continue
            if not isinstance(meaning, ScrapeFailed):
                log_failure(_log, "a body could not be stored", meaning)
                meaning = internal_failure()
            self._fail_answered(held, meaning)

    def _fail_answered(self, held: ClaimedTask, failure: ScrapeFailed) -> None:
        """Let an attempt fail whose call was answered: what the call cost stays in the history."""
        if isinstance(held.settlement, Succeeded):
            event = held.settlement.event
            failure.spend, failure.sent = event.spend, event.sent
        held.settlement = self._verdict(held, failure)

    def _count_success(self, held: ClaimedTask) -> None:
        if isinstance(held.settlement, Succeeded):
            self._observer.gateway_called("successful")

    # -- settlements --

    async def settle(self, answered: Sequence[Held]) -> list[Outcome | Exception]:
        tasks = [held for held in answered if isinstance(held, ClaimedTask)]
        if self._pipeline is not None:
            await self._store_all(self._pipeline, tasks)
        else:
            for held in tasks:
                try:
                    await self._store(held, self._packs)
                except ConveyorError as error:
                    held.error = error
        ready = [held for held in tasks if held.error is None]
        for held in ready:
            self._count_success(held)
        outcomes: dict[ClaimedTask, Outcome] = {}
        for held, settled in zip(ready, await self._settle_all(ready), strict=True):
            try:
                if isinstance(settled, Exception):
                    raise settled
                outcome = self._note_settled(held, settled)
                outcomes[held] = outcome or await self._after(held, settled)
            except Exception as error:
                held.error = error
        lost = [held for held in tasks if held.error is not None]
        if lost:
            await self.undo(lost)
        return [held.error or outcomes[held] for held in tasks]

    async def _settle_all(self, tasks: Sequence[ClaimedTask]) -> list[Settled | Exception]:
        """Settle tasks, in one operation if the store has one."""
        began = self._clock.now()
        try:
            if self._pipeline is not None and len(tasks) > 1:
                now = self._clock.now()
                requests = [
                    SettleRequest(row.run_id, row.task_id, row.claim_number, held.settlement, now)
                    for held in tasks
                    for row in [held.task]
                ]
                return await self._pipeline.tasks.settle_tasks(requests)
            return [await self._settle(held) for held in tasks]
        except Exception as error:
            return [error] * len(tasks)
        finally:
            self._trace(tasks, "settlement", began)

    async def _settle(self, held: ClaimedTask) -> Settled:
        task = held.task
        return await self._tasks.settle_task(
            task.run_id, task.task_id, task.claim_number, held.settlement, now=self._clock.now()
        )

    def _note_settled(self, held: ClaimedTask, settled: Settled) -> Outcome | None:
        """Take note of a settlement; return what follows if the task ended successful, else None,
        and more is to be done."""
        self._forget(held, ended=True)
        if held.answered_at is not None:
            self._observer.task_settled(self._clock.monotonic() - held.answered_at)
        if held.trace is not None:
            failed = isinstance(held.settlement, Failed)
            attributes = trace_attributes(held.job_id, held.task, held.settlement)
            held.trace.end(self._clock.now(), attributes, failed=failed)
        if settled.applied and isinstance(held.settlement, Succeeded):
            return self._ended(_message_of(held), held, settled)
        return None

    async def _after(self, held: ClaimedTask, settled: Settled) -> Outcome:
        """Return what follows from a settlement with which no task ended successful."""
        settlement = held.settlement
        if isinstance(settlement, Succeeded):
            # The claim was lost, or the run deleted: nothing will ever refer to this body.
            await self._remove(held.blob_key)
            return ACKNOWLEDGE
        if held.stored:
            # What came behind the body made the attempt fail.
            await self._discard(held)
        if isinstance(settlement, Failed):
            return self._ended(_message_of(held), held, settled)
        if isinstance(settlement, Released) or settled.run_status not in LIVE_RUN_STATES:
            return ACKNOWLEDGE
        # Not for longer than was meant, if the clock was set back meanwhile.
        now = max(self._clock.now(), held.started_at)
        hide_for = max(0.0, (settlement.not_before - now) / 1000)
        return Outcome(hide_for=hide_for, waiting=self._retry_policy.waits_for(settlement))

    def _ended(self, ended: TaskMessage, held: ClaimedTask | None, settled: Settled) -> Outcome:
        """Count and log the end of a task; `held` is None for one interrupted too often."""
        if settled.applied:
            is_success = held is not None and isinstance(held.settlement, Succeeded)
            self._observer.task_ended("successful" if is_success else "failed")
            if _log.isEnabledFor(logging.INFO) and (
                not is_success or is_sampled(ended.task_id, self._options.log_ratio)
            ):
                self._log_end(ended, held, "successful" if is_success else "failed")
        if settled.run_status is not None and settled.run_status not in LIVE_RUN_STATES:
            return self._run_ended(ended.run_id)
        return ACKNOWLEDGE

    def _log_end(self, ended: TaskMessage, held: ClaimedTask | None, state: str) -> None:
        settlement = None if held is None else held.settlement
        event, reason = last_attempt(settlement)
        size = settlement.result.size if isinstance(settlement, Succeeded) else None
        fields = {
            "task_id": ended.task_id,
            "run_id": ended.run_id,
            "job_id": ended.job_id,
            "state": state,
            "ms": event.ended_at - event.started_at if event is not None else None,
            "attempt": event.attempt if event is not None else None,
            "bytes": size,
            "url": None if held is None else self._url_to_log(held.task),
            "reason": reason,
        }
        _log.info("task ended", extra=fields)

    def _url_to_log(self, task: Task) -> str | None:
        return logged_url(task.spec.url) if self._options.logs_urls else None

    def _run_ended(self, run_id: str) -> Outcome:
        return Outcome(drop_queue=partial(self._drop_run, run_id))

    async def _drop_run(self, run_id: str) -> None:
        try:
            await self._queues.drop_run(run_id)
        finally:
            self._signals.run_ended(run_id)


def _message_of(held: ClaimedTask) -> TaskMessage:
    return TaskMessage(held.job_id, held.task.run_id, held.task.task_id, FIRST_VERSION)


def _meaning(error: ConveyorError) -> ScrapeFailed | ResultLost:
    """Return what the loss of a body means. If the store refuses this very body, the attempt
    failed: otherwise the gateway would be called for it for ever."""
    if isinstance(error, BodyRefused):
        _log.error("the store refused a body", extra={"error": str(error)})
        return refused_body(error)
    return ResultLost(error.code, error.detail, retry_after=error.retry_after)
