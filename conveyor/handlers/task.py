"""Work one task: claim it, call the gateway, store the body, settle. The last settlement ends the
run."""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass
from functools import partial

import anyio
import msgspec

from conveyor.aio.resilience import CircuitBreaker
from conveyor.domain.api_keys import UnsealError
from conveyor.domain.errors import ConveyorError
from conveyor.domain.model import StoredBody, Task
from conveyor.domain.params import implied_format, merge
from conveyor.domain.states import LIVE_RUN_STATES
from conveyor.domain.task_rules import Failed, Released, Retry, Settlement, Succeeded
from conveyor.handlers.retry_policy import (
    RetryPolicy,
    attempt_event,
    internal_failure,
    unreadable_key,
)
from conveyor.ports.blobs import BlobWriter, BodyRefused, Content
from conveyor.ports.clock import Clock
from conveyor.ports.gateway import Gateway, ScrapeFailed, ScrapeRequest
from conveyor.ports.handler import ACKNOWLEDGE, Observer, Outcome, ResultLost, Throttled
from conveyor.ports.queues import Delivery, Queues, Signals, TaskMessage
from conveyor.ports.records import WorkerRuns
from conveyor.ports.tasks import ClaimedElsewhere, NotClaimable, Settled, TaskClaims
from conveyor.records.blob_keys import result_key
from conveyor.records.job_templates import JobTemplate, JobTemplates

SUSPECT_PAUSE = 0.2
"""Seconds until a task that may kill its worker asks again whether another such task is done."""
PATIENCE = 6
"""Calls for one message while the gateway refuses for load, before the message is hidden."""
PATIENT_PAUSE = 5.0
"""Longest pause, in seconds, that is waited for with the permit in hand."""

_log = logging.getLogger("conveyor.tasks")


class TaskOptions(msgspec.Struct, frozen=True):
    """The worker's name in claims, the length of a claim, and the bounds of work."""

    worker: str
    visibility: float
    gateway_timeout: float
    max_result_bytes: int
    max_interruptions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPorts:
    """The roles that working tasks uses."""

    tasks: TaskClaims
    runs: WorkerRuns
    blobs: BlobWriter
    queues: Queues
    signals: Signals
    gateway: Gateway


class TaskHandler:
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
        self._blobs = ports.blobs
        self._queues = ports.queues
        self._signals = ports.signals
        self._gateway = ports.gateway
        self._templates = templates
        self._clock = clock
        self._retry_policy = retry_policy
        self._observer = observer
        self._options = options
        self._claims: dict[tuple[str, str], int] = {}
        self._has_suspect = False
        self._calls = 0
        self._breaker = CircuitBreaker(clock, dependency="the result store")

    async def handle(self, delivery: Delivery, throttled: Throttled) -> Outcome:
        """Work the task that a message names, if it can be claimed and its body stored.

        Raises ConveyorError(unavailable) if a port is down; ResultLost, which is such an error, if
        that showed after a call of the gateway.
        """
        with self._breaker.guard():
            return await self._claim(delivery, throttled)

    async def _claim(self, delivery: Delivery, throttled: Throttled) -> Outcome:
        message = delivery.message
        assert isinstance(message, TaskMessage)
        now = self._clock.now()
        # Name each call, so that undoing one claim never undoes another of the same worker.
        self._calls += 1
        holder = f"{self._options.worker}/{self._calls}"
        try:
            claim = await self._tasks.claim_task(
                message.run_id,
                message.task_id,
                worker=holder,
                now=now,
                claimed_until=now + int(self._options.visibility * 1000),
                max_interruptions=self._options.max_interruptions,
            )
        except BaseException:
            # A cancelled claim may have been written all the same.
            with anyio.CancelScope(shield=True):
                await self._tasks.release_claim(message.run_id, message.task_id, worker=holder)
            raise
        if isinstance(claim, ClaimedElsewhere):
            return Outcome(hide_for=max(0.0, (claim.until - now) / 1000))
        if isinstance(claim, NotClaimable):
            if claim.run_status is not None:
                return self._ended(message, "failed", Settled(True, claim.run_status))
            return ACKNOWLEDGE
        task = claim.task
        key = (task.run_id, task.task_id)
        self._claims[key] = task.claim_number
        try:
            if self._is_suspect(task):
                return await self._work_alone(task, delivery, throttled)
            return await self._work(task, delivery, throttled)
        except BaseException:
            # The worker stops, or a store is down: give the claim back, so that nobody has to wait
            # until it lapses.
            with anyio.CancelScope(shield=True):
                self._observer.claim_undone()
                await self._settle(task, Released())
            raise
        finally:
            self._claims.pop(key, None)

    async def renew(self) -> None:
        """Extend the claims of all tasks in work."""
        if self._claims:
            claims = [(run, task, number) for (run, task), number in self._claims.items()]
            until = self._clock.now() + int(self._options.visibility * 1000)
            await self._tasks.renew_claims(claims, claimed_until=until)

    def _is_suspect(self, task: Task) -> bool:
        """Return whether so many of its claims lapsed that the task itself may kill its workers."""
        return 2 * task.interruptions >= self._options.max_interruptions

    async def _work_alone(self, task: Task, delivery: Delivery, throttled: Throttled) -> Outcome:
        """Work one suspect at a time. A task that kills its worker also interrupts its neighbours,
        and they must not be interrupted as often as it is."""
        if self._has_suspect:
            await self._settle(task, Released())
            return Outcome(hide_for=SUSPECT_PAUSE)
        self._has_suspect = True
        try:
            return await self._work(task, delivery, throttled)
        finally:
            self._has_suspect = False

    async def _work(self, task: Task, delivery: Delivery, throttled: Throttled) -> Outcome:
        started = self._clock.now()
        try:
            template = await self._templates.get(delivery.message.job_id)
        except UnsealError:
            return await self._unreadable_key(task, started)
        if template is None:
            return ACKNOWLEDGE
        try:
            settlement = await self._scrape_patiently(task, template, started, throttled)
        except ScrapeFailed as failure:
            receives = delivery.receive_count
            return await self._failed(task, template, failure, started=started, receives=receives)
        self._observer.gateway_called("successful")
        settled = await self._settle(task, settlement)
        if not settled.applied:
            # The claim was lost, or the run deleted: nothing will ever refer to this body.
            await self._blobs.delete(settlement.result.blob_key)
            return ACKNOWLEDGE
        return self._ended(task, "successful", settled)

    async def _scrape_patiently(
        self, task: Task, template: JobTemplate, started: int, throttled: Throttled
    ) -> Succeeded:
        """Scrape; while the gateway refuses for load, wait with the permit in hand, so that the
        message need not be received again. Raises ScrapeFailed."""
        for call in itertools.count(1):
            try:
                return await self._scrape(task, template, started)
            except ScrapeFailed as failure:
                if failure.burns_attempt:
                    raise
                throttled()
                pause = self._retry_policy.pause(failure, task, call)
                if call >= PATIENCE or pause is None or pause > PATIENT_PAUSE:
                    raise
                self._observer.gateway_called("retry")
                await self._clock.sleep(pause)
                if await self._runs.dispatchable_run(task.run_id) is None:
                    raise
        raise AssertionError("unreachable")

    async def _scrape(self, task: Task, template: JobTemplate, started: int) -> Succeeded:
        job = template.job
        params = merge(job.params, task.spec.params) if task.spec.params else job.params
        request = ScrapeRequest(
            url=task.spec.url,
            api_key=template.api_key,
            method=task.spec.method,
            body=task.spec.body,
            params=params,
            timeout=self._options.gateway_timeout,
            max_bytes=self._options.max_result_bytes,
        )
        key = result_key(
            job.job_id,
            task.run_id,
            task.task_id,
            task.claim_number,
            template.lifecycle_days,
        )
        try:
            async with self._gateway.scrape(request) as success:
                size = await self._keep(key, success.content)
        except (ScrapeFailed, ConveyorError):
            raise
        except Exception:
            _log.exception("an attempt failed unexpectedly", extra={"task_id": task.task_id})
            raise internal_failure() from None
        event = attempt_event(task, started_at=started, ended_at=self._clock.now())
        result = StoredBody(
            blob_key=key,
            size=size,
            content_type=success.content_type,
            format=implied_format(params) if task.spec.params else job.format,
        )
        return Succeeded(
            msgspec.structs.replace(event, spend=success.spend, sent=success.sent), result
        )

    async def _keep(self, key: str, content: Content) -> int:
        """Store a body; return its size. If the store refuses this very body, the attempt failed:
        otherwise the gateway would be called for it for ever."""
        try:
            size = await self._blobs.put(key, content)
        except BodyRefused as refused:
            _log.error("the store refused a body", extra={"error": str(refused)})
            # The store works, and would keep another body.
            self._breaker.succeeded()
            raise internal_failure() from None
        except ConveyorError as error:
            self._breaker.failed()
            raise ResultLost(error.code, error.detail, retry_after=error.retry_after) from error
        self._breaker.succeeded()
        return size

    async def _failed(
        self,
        task: Task,
        template: JobTemplate,
        failure: ScrapeFailed,
        *,
        started: int,
        receives: int,
    ) -> Outcome:
        if failure.account is not None:
            self._observer.gateway_called("refused")
            detail = failure.problem.detail or failure.problem.title
            await self._runs.fail_run(
                task.run_id, reason=failure.account, detail=detail[:500], now=self._clock.now()
            )
            await self._settle(task, Released())
            return self._run_ended(task.run_id)
        event = attempt_event(task, started_at=started, ended_at=self._clock.now(), failure=failure)
        verdict = self._retry_policy.decide(
            failure, task, template.job, event=event, receives=receives
        )
        self._observer.gateway_called("retry" if isinstance(verdict, Retry) else "failed")
        settled = await self._settle(task, verdict)
        if isinstance(verdict, Failed):
            return self._ended(task, "failed", settled)
        if settled.run_status not in LIVE_RUN_STATES:
            return ACKNOWLEDGE
        delay = max(0.0, (verdict.not_before - self._clock.now()) / 1000)
        return Outcome(hide_for=delay)

    async def _unreadable_key(self, task: Task, started: int) -> Outcome:
        failure = unreadable_key()
        event = attempt_event(task, started_at=started, ended_at=self._clock.now(), failure=failure)
        verdict = Failed(event, failure.problem, failure.failure)
        return self._ended(task, "failed", await self._settle(task, verdict))

    def _ended(self, task: Task | TaskMessage, state: str, settled: Settled) -> Outcome:
        if settled.applied:
            self._observer.task_ended(state)
            if _log.isEnabledFor(logging.INFO):
                fields = {"task_id": task.task_id, "run_id": task.run_id, "state": state}
                _log.info("task ended", extra=fields)
        if settled.run_status is not None and settled.run_status not in LIVE_RUN_STATES:
            return self._run_ended(task.run_id)
        return ACKNOWLEDGE

    def _run_ended(self, run_id: str) -> Outcome:
        return Outcome(drop_queue=partial(self._drop_run, run_id))

    async def _drop_run(self, run_id: str) -> None:
        try:
            await self._queues.drop_run(run_id)
        finally:
            self._signals.run_changed(run_id)

    async def _settle(self, task: Task, settlement: Settlement) -> Settled:
        return await self._tasks.settle_task(
            task.run_id, task.task_id, task.claim_number, settlement, now=self._clock.now()
        )
