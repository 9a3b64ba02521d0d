"""`conveyor admin` for one environment: create, check and remove its table, queues and bucket, and
change the settings that its processes share.

Resources are created in the order in which they depend on each other, and removed in the opposite
one. Commands that need a fleet at rest first watch for workers that are alive.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self, TypeVar

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.clock import Clock
from conveyor.ports.permits import LeaseRequest
from conveyor.prod.admin.checks import (
    MADE,
    Finding,
    blobs_problem,
    callbacks_problem,
    clock_problem,
    queues_problem,
    rows_problem,
    run_check,
)
from conveyor.prod.admin.resources import NO_TABLE, BucketResource, QueuesResource, TableResource
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.aws.client import AwsClient
from conveyor.prod.aws.opening import open_clients
from conveyor.prod.aws.refusals import describe
from conveyor.prod.dynamodb.client import Table
from conveyor.prod.options import ProdOptions
from conveyor.prod.redis.permits import RedisPermits
from conveyor.prod.redis.server import RedisServer
from conveyor.prod.sealing import open_data_key
from conveyor.prod.startup_checks import (
    BEAT,
    WATCH,
    agree,
    change_ledger,
    difference,
    fleet_item,
    nobody_works,
    pause_fleet,
    rebind,
    resume_fleet,
    terms,
)

WORKER_WATCH = 3 * BEAT
"""Seconds without a sign of a worker after which a fleet may be removed."""

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ResourceChange:
    """One resource, and its `outcome`: made, there, changed, removed or absent. A `detail` says
    what was changed."""

    outcome: str
    label: str
    detail: str | None = None

    def __str__(self) -> str:
        line = f"{self.outcome:<8}{self.label}"
        return line if self.detail is None else f"{line}: {self.detail}"


T = TypeVar("T")


class Resource(Protocol):
    """One resource in AWS that is created and removed; `label` names it to the operator."""

    label: str

    async def ensure(self) -> str:
        """Create the resource or its missing parts. Return MADE if all of it was missing, else a
        text about the change; "" if nothing was."""
        ...

    async def problem(self) -> str | None:
        """Return the first problem of the resource, if any."""
        ...

    async def remove(self) -> bool:
        """Remove the resource with its content; return False if it did not exist."""
        ...


class Administration:
    """Administers one environment. Opened by `open_administration`; closed at the end of its block.

    Raises refusals of AWS as ConveyorError, in one line.
    """

    def __init__(self, aws: AwsClient, options: ProdOptions, clock: Clock) -> None:
        self._aws = aws
        self._options = options
        self._clock = clock
        self._table = Table(aws, options.table, clock)
        self._rows = TableResource(aws, options.table, clock)
        self._queues = QueuesResource(
            aws, clock, environment=options.environment, max_receives=options.max_receives
        )
        self._blobs = BucketResource(
            aws, options.bucket, region=options.aws.region, environment=options.environment
        )
        self._terms = terms(options)
        self._fleet = f"terms of the fleet: permits in {options.ledger}, bodies in {options.bucket}"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._aws.aclose()

    async def init(self) -> AsyncIterator[ResourceChange]:
        """Create missing resources; yield what became of each. Raises ConveyorError for the first
        that cannot be created."""
        yield await self._ensure(self._rows)
        # Join the fleet before creating a bucket: a disagreement must leave nothing behind.
        had = await _translate_refusals(fleet_item(self._table))
        await self._join_fleet()
        yield await self._ensure(self._queues)
        yield await self._ensure(self._blobs)
        if self._options.ledger == "redis":
            # A new ledger stays closed for one lease; start it now, not with the first task.
            await self._redis_problem()
        yield ResourceChange("made" if had is None else "there", self._fleet)

    async def _ensure(self, resource: Resource) -> ResourceChange:
        try:
            changed = await resource.ensure()
        except AwsRefused as refused:
            text = f"{resource.label}: {describe(refused)}"
            raise ConveyorError(ErrorCode.UNAVAILABLE, text) from None
        if changed in ("", MADE):
            return ResourceChange(changed or "there", resource.label)
        return ResourceChange("changed", resource.label, changed)

    async def _join_fleet(self) -> None:
        """Agree on the terms of the fleet, without counting as a worker that is alive."""
        item = await _translate_refusals(agree(self._table, self._terms, works=False))
        problem = difference(item, self._terms, works=True)
        if problem is not None:
            raise ConveyorError(ErrorCode.CONFLICT, problem)

    async def check(self) -> AsyncIterator[Finding]:
        """Yield a finding for each resource, and for the use of those that exist."""
        aws, options, clock = self._aws, self._options, self._clock
        there = set()
        for resource in self._resources():
            finding = await run_check(resource.label, resource.problem)
            if finding.problem is None:
                there.add(resource)
            yield finding
        yield await run_check("clock", lambda: clock_problem(self._table, clock))
        if self._rows in there:
            yield await run_check(self._fleet, self._fleet_problem)
            yield await run_check("use of the table", lambda: rows_problem(aws, self._table, clock))
        if self._queues in there:
            yield await run_check(
                "use of queues", lambda: queues_problem(aws, options.environment, clock)
            )
        if self._blobs in there:
            yield await run_check(
                "use of the bucket", lambda: blobs_problem(aws, options.bucket, clock)
            )
        yield await run_check("callbacks", lambda: callbacks_problem(aws, clock))
        if options.redis_url:
            yield await run_check("redis", self._redis_problem)
        if options.kms_key and self._rows in there:
            yield await run_check("data key under KMS", self._data_key_problem)

    async def check_no_worker(self, say: Report) -> None:
        """Watch for workers for a while, and report that. Raises ConveyorError(conflict) if one is
        alive. An API gives no sign of life, so it goes unnoticed."""
        try:
            nobody = await nobody_works(
                self._table, watch=WORKER_WATCH, watching=_report_watch(say, WORKER_WATCH)
            )
        except AwsRefused as refused:
            if refused.word == NO_TABLE:
                return
            raise ConveyorError(ErrorCode.UNAVAILABLE, describe(refused)) from None
        if not nobody:
            raise ConveyorError(
                ErrorCode.CONFLICT,
                "a worker is alive: stop all processes first (--even-if-alive does not look)",
            )

    async def destroy(self) -> AsyncIterator[ResourceChange]:
        """Remove all resources of the environment; yield what became of each. Raises
        ConveyorError(conflict), before anything is removed, if the fleet uses another bucket than
        the options name, or the table is protected."""
        await self._check_bucket()
        if await _translate_refusals(self._rows.is_protected()):
            text = f"{self._rows.label} is protected: switch its deletion protection off first"
            raise ConveyorError(ErrorCode.CONFLICT, text)
        for resource in reversed(self._resources()):
            removed = await _translate_refusals(resource.remove())
            yield ResourceChange("removed" if removed else "absent", resource.label)

    async def _check_bucket(self) -> None:
        try:
            item = await fleet_item(self._table)
        except AwsRefused as refused:
            if refused.word != NO_TABLE:
                raise ConveyorError(ErrorCode.UNAVAILABLE, describe(refused)) from None
            item = None
        bucket = None if item is None else item.get("bucket_name")
        if bucket not in (None, self._options.bucket):
            raise ConveyorError(
                ErrorCode.CONFLICT,
                f"the bodies of the fleet are in bucket {bucket}, not in {self._options.bucket}",
            )

    async def move_ledger(self, kind: str, say: Report) -> bool:
        """Move the fleet's permits to another ledger, after a minute without a sign of a worker;
        return False if they are there already. Raises ConveyorError(conflict) if a worker is
        alive."""
        return await _translate_refusals(
            change_ledger(self._table, kind, watching=_report_watch(say, WATCH))
        )

    async def rebind(self, say: Report) -> bool:
        """Make the bucket of these options the fleet's, and their secret if they have one. Watches
        for workers as `move_ledger` does."""
        changed = await _translate_refusals(
            rebind(self._table, self._terms, watching=_report_watch(say, WATCH))
        )
        await _translate_refusals(self._blobs.take())
        return changed

    async def pause(self) -> int | None:
        """Order that nothing new starts in the fleet; return since when it was so ordered already,
        None if it was not."""
        return await _translate_refusals(pause_fleet(self._table))

    async def resume(self) -> int | None:
        """Take that order back; return since when it held, None if there was none."""
        return await _translate_refusals(resume_fleet(self._table))

    def _resources(self) -> tuple[Resource, ...]:
        return self._rows, self._queues, self._blobs

    async def _fleet_problem(self) -> str | None:
        item = await fleet_item(self._table)
        if item is None or "bucket_name" not in item:
            return "are not written yet (run conveyor admin init)"
        problem = difference(item, self._terms, works=True)
        return (
            None if problem is None else f"{problem} (change it by conveyor admin ledger or rebind)"
        )

    async def _data_key_problem(self) -> None:
        """Open the data key. The first process that opens it creates it, so a check may do so."""
        options = self._options
        await open_data_key(
            self._aws, self._table, kms_key=options.kms_key, environment=options.environment
        )

    async def _redis_problem(self) -> str | None:
        """Ask for zero permits, which holds nothing."""
        server = RedisServer(self._options.redis_url, self._clock)
        permits = RedisPermits(server, environment=self._options.environment)
        try:
            await permits.acquire_or_renew(
                LeaseRequest(job_id="check", holder="check", count=0, before=0, sequence=1),
                limit=1,
                lease=self._options.permit_lease,
            )
        finally:
            await server.aclose()
        return None


async def open_administration(options: ProdOptions, clock: Clock) -> Administration:
    """Open the administration of one environment."""
    aws = await open_clients(options.aws, clock, *options.services)
    return Administration(aws, options, clock)


def _report_watch(say: Report, seconds: float) -> Callable[[], None]:
    return lambda: say(f"watching for {seconds:g} s that no worker is alive")


async def _translate_refusals(call: Awaitable[T]) -> T:
    try:
        return await call
    except AwsRefused as refused:
        raise ConveyorError(ErrorCode.UNAVAILABLE, describe(refused)) from None
