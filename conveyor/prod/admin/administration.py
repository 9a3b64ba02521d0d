"""The resources of one environment together, in the order in which they need each other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
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
    tried,
)
from conveyor.prod.admin.resources import NO_TABLE, BucketResource, QueuesResource, TableResource
from conveyor.prod.aws.boto import BotoAws, open_clients
from conveyor.prod.aws.calls import AwsRefused
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
    rebind,
    terms,
)

LOOK = 3 * BEAT
"""Seconds without a word of a worker, after which a fleet may be removed."""

Say = Callable[[str], None]
T = TypeVar("T")


class Resource(Protocol):
    """One thing in AWS that is made and removed; `what` names it."""

    what: str

    async def ensure(self) -> str:
        """Make what is missing of it: MADE where that was all of it, else what was changed of one
        that was there; empty: nothing."""
        ...

    async def problem(self) -> str | None:
        """What is wrong with it."""
        ...

    async def remove(self) -> bool:
        """Remove it with what is in it; whether there was anything."""
        ...


class Administration:
    """Makes, checks and removes. Opened by `open_administration`, closed at the end of a block.

    Refusals of AWS are raised as ConveyorError, in one line.
    """

    def __init__(self, aws: BotoAws, options: ProdOptions, clock: Clock) -> None:
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

    async def init(self) -> AsyncIterator[str]:
        """Make what is missing; a line for each thing. Raises ConveyorError for the first that
        cannot be made."""
        yield await self._ensured(self._rows)
        # Before a bucket is made that the fleet has no use for.
        had = await _plainly(fleet_item(self._table))
        await self._agree()
        yield await self._ensured(self._queues)
        yield await self._ensured(self._blobs)
        if self._options.ledger == "redis":
            # A ledger is closed for a lease from when it begins: better now than at the first task.
            await self._redis_problem()
        yield f"{'made' if had is None else 'there':<8}{self._fleet}"

    async def _ensured(self, resource: Resource) -> str:
        try:
            changed = await resource.ensure()
        except AwsRefused as refused:
            text = f"{resource.what}: {describe(refused)}"
            raise ConveyorError(ErrorCode.UNAVAILABLE, text) from None
        if changed in ("", MADE):
            return f"{changed or 'there':<8}{resource.what}"
        return f"{'changed':<8}{resource.what}: {changed}"

    async def _agree(self) -> None:
        """Nothing is said of a worker that is alive."""
        item = await _plainly(agree(self._table, self._terms, works=False))
        problem = difference(item, self._terms, works=True)
        if problem is not None:
            raise ConveyorError(ErrorCode.CONFLICT, problem)

    async def check(self) -> AsyncIterator[Finding]:
        """A finding for each thing. What is not there is not tried out."""
        aws, options, clock = self._aws, self._options, self._clock
        there = set()
        for resource in self._resources():
            finding = await tried(resource.what, resource.problem)
            if finding.problem is None:
                there.add(resource)
            yield finding
        yield await tried("clock", lambda: clock_problem(self._table, clock))
        if self._rows in there:
            yield await tried(self._fleet, self._fleet_problem)
            yield await tried("use of the table", lambda: rows_problem(aws, self._table, clock))
        if self._queues in there:
            yield await tried(
                "use of queues", lambda: queues_problem(aws, options.environment, clock)
            )
        if self._blobs in there:
            yield await tried(
                "use of the bucket", lambda: blobs_problem(aws, options.bucket, clock)
            )
        yield await tried("callbacks", lambda: callbacks_problem(aws, clock))
        if options.redis_url:
            yield await tried("redis", self._redis_problem)
        if options.kms_key and self._rows in there:
            yield await tried("data key under KMS", self._data_key_problem)

    async def check_no_worker(self, say: Say) -> None:
        """Watch for a while, and say so. Raises ConveyorError(conflict) where a worker is alive; an
        API says nothing and is not noticed."""
        try:
            nobody = await nobody_works(self._table, watch=LOOK, watching=_watching(say, LOOK))
        except AwsRefused as refused:
            if refused.word == NO_TABLE:
                return
            raise ConveyorError(ErrorCode.UNAVAILABLE, describe(refused)) from None
        if not nobody:
            raise ConveyorError(
                ErrorCode.CONFLICT,
                "a worker is alive: stop all processes first (--even-if-alive does not look)",
            )

    async def destroy(self) -> AsyncIterator[str]:
        """Remove everything of the environment; a line for each thing. Raises ConveyorError:
        (conflict) before anything went, where the bucket of the options is not the fleet's."""
        await self._check_bucket()
        for resource in reversed(self._resources()):
            removed = await _plainly(resource.remove())
            yield f"{'removed' if removed else 'absent '} {resource.what}"

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

    async def move_ledger(self, kind: str, say: Say) -> bool:
        """Let the fleet keep its permits elsewhere, after a minute without a word of a worker,
        which is said; False where it does already. Raises ConveyorError(conflict) where a worker is
        alive."""
        return await _plainly(change_ledger(self._table, kind, watching=_watching(say, WATCH)))

    async def rebind(self, say: Say) -> bool:
        """Let the fleet have the bucket, and the secret if there is one, of these options, as
        `move_ledger` does its ledger."""
        changed = await _plainly(rebind(self._table, self._terms, watching=_watching(say, WATCH)))
        await _plainly(self._blobs.take())
        return changed

    def _resources(self) -> tuple[Resource, ...]:
        return self._rows, self._queues, self._blobs

    async def _fleet_problem(self) -> str | None:
        item = await fleet_item(self._table)
        if item is None or "bucket_name" not in item:
            return "is not agreed on (conveyor admin init sees to it)"
        problem = difference(item, self._terms, works=True)
        return (
            None if problem is None else f"{problem} (conveyor admin ledger and rebind change it)"
        )

    async def _data_key_problem(self) -> None:
        """The first who asks has it made; that may as well be a check."""
        options = self._options
        await open_data_key(
            self._aws, self._table, kms_key=options.kms_key, environment=options.environment
        )

    async def _redis_problem(self) -> str | None:
        """Nothing is held by a question for no permit."""
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
    """The administration of one environment."""
    aws = await open_clients(options.aws, clock, *options.services)
    return Administration(aws, options, clock)


def _watching(say: Say, seconds: float) -> Callable[[], None]:
    return lambda: say(f"watching for {seconds:g} s that no worker is alive")


async def _plainly(call: Awaitable[T]) -> T:
    try:
        return await call
    except AwsRefused as refused:
        raise ConveyorError(ErrorCode.UNAVAILABLE, describe(refused)) from None
