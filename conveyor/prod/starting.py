"""What a process looks at before it works: that it is of this fleet, and that all is there.

Whatever is missing would else be found by the first task, and only where it is needed.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from conveyor.aio.concurrency import side_by_side
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.queues import CONTROL_QUEUE
from conveyor.prod.aws.calls import Aws, AwsRefused
from conveyor.prod.aws.refusals import NotDeployed, told
from conveyor.prod.dynamodb.fleet import Terms, agree, fingerprint, names_callers_anew
from conveyor.prod.dynamodb.items import Table
from conveyor.prod.options import ProdOptions
from conveyor.prod.redis.server import RedisServer
from conveyor.prod.s3.bucket import bucket_exists
from conveyor.prod.s3.ownership import own
from conveyor.prod.sqs.addresses import ABSENT
from conveyor.prod.sqs.names import prefix

T = TypeVar("T")
Check = Callable[[Aws, ProdOptions], Awaitable[None]]

_log = logging.getLogger("conveyor.roles")
_permits_log = logging.getLogger("conveyor.permits")


def things(options: ProdOptions) -> dict[str, str]:
    """What is deployed, by service, in the words of whoever runs the fleet."""
    return {
        "dynamodb": f"table {options.table}",
        "s3": f"bucket {options.bucket}",
        "sqs": f"queues {prefix(options.environment)}…",
    }


def terms(options: ProdOptions) -> Terms:
    """What a process with these options works by."""
    secrets = filter(None, (options.root_secret, *options.older_secrets))
    return Terms(
        ledger=options.ledger,
        bucket=options.bucket,
        secrets=tuple(fingerprint(secret) for secret in secrets),
    )


async def start(
    aws: Aws, table: Table, options: ProdOptions, *, works: bool
) -> Callable[[], Awaitable[None]]:
    """Look at everything; what is to be called every `BEAT` seconds from then on.

    Raises ConveyorError, and so does that: (unavailable) where AWS is away, refuses, or lacks
    table, bucket or queue; (conflict) where the fleet has other terms.
    """
    own = terms(options)

    async def beat() -> None:
        await _plainly(agree(table, own, works=works))

    item = await _plainly(agree(table, own, works=works))
    if names_callers_anew(item, own):
        _log.warning(
            "the last part of CONVEYOR_SECRET, which names callers, is another than this fleet"
            " began with: their jobs so far belong to nobody"
        )

    await _look(aws, options)
    return beat


async def _look(aws: Aws, options: ProdOptions) -> None:
    """All that is wrong with what was deployed is told, in one order: a wrong environment, say, is
    seen by both, and which of them answers first would else decide what is read of it."""
    found: dict[Check, ConveyorError] = {}

    async def look(check: Check) -> None:
        try:
            await _plainly(check(aws, options))
        except ConveyorError as error:
            found[check] = error

    await side_by_side(look, _CHECKS)
    problems = [found[check] for check in _CHECKS if check in found]
    if problems:
        text = "; ".join(problem.detail for problem in problems)
        raise ConveyorError(problems[0].code, text)


async def look_at_redis(server: RedisServer, options: ProdOptions, *, works: bool) -> None:
    """Say what cannot be done where Redis does not answer. It may come later: nothing is raised."""
    if works and options.ledger == "redis":
        without = "permits cannot be taken until it does"
    elif not works and options.rate_limit:
        without = "the rate of requests is not limited until it does"
    else:
        return
    try:
        await server.look()
    except ConveyorError as error:
        _permits_log.warning("%s (%s): %s", error.detail, server.place, without)


async def _bucket(aws: Aws, options: ProdOptions) -> None:
    if not await bucket_exists(aws, options.bucket):
        raise _absent(f"bucket {options.bucket}")
    await own(aws, options.bucket, options.environment)


async def _control_queue(aws: Aws, options: ProdOptions) -> None:
    name = f"{prefix(options.environment)}{CONTROL_QUEUE}"
    try:
        await aws.call("sqs", "get_queue_url", {"QueueName": name})
    except AwsRefused as refused:
        if refused.word not in ABSENT:
            raise
        raise _absent(f"queue {name}") from None


_CHECKS: tuple[Check, ...] = (_bucket, _control_queue)


def _absent(what: str) -> ConveyorError:
    return ConveyorError(
        ErrorCode.UNAVAILABLE, f"there is no {what} (conveyor admin init makes it)"
    )


async def _plainly(call: Awaitable[T]) -> T:
    """What is wrong in the words of whoever runs the fleet."""
    try:
        return await call
    except NotDeployed as error:
        raise ConveyorError(ErrorCode.UNAVAILABLE, error.problem) from None
    except AwsRefused as refused:
        raise ConveyorError(ErrorCode.UNAVAILABLE, told(refused)) from None
