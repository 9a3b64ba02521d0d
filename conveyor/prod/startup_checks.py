"""Startup checks: the resources of the fleet exist, and the process works by the fleet's terms.

Without the checks, a missing resource would surface only in the first task that needs it.

The terms are what all processes of a fleet must agree on: the ledger of permits, the bucket of
bodies, and the secrets that callers' ids and sealed keys depend on. Two ledgers would grant a job's
limit twice; nobody finds a body in another bucket; nobody owns a job under another secret. So the
first process writes the terms to the store, and every process confirms that it works by them, on
condition that they still hold: `agree` at the start, and then every `BEAT` seconds. `beats` counts
the confirmations of workers. An operator may change the terms while no worker confirms them; the
counter alone shows that, without comparing clocks.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from conveyor.aio.concurrency import for_each
from conveyor.domain.api_keys import fingerprint
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.queues import CONTROL_QUEUE
from conveyor.ports.workers import FleetPause
from conveyor.prod.aws.calls import Aws, AwsRefused
from conveyor.prod.aws.refusals import ABSENCES, NotDeployed, describe
from conveyor.prod.dynamodb.client import Item, Plain, Table, conflicting_item
from conveyor.prod.dynamodb.schema import FLEET, TABLE_SHAPE
from conveyor.prod.options import ProdOptions
from conveyor.prod.redis.server import RedisServer
from conveyor.prod.s3.bucket import bucket_exists, own
from conveyor.prod.sqs.registry import NO_QUEUE, prefix

BEAT = 10.0
"""Seconds between two confirmations of a worker."""
WATCH = 60.0
"""Seconds without a confirmation after which no worker counts as alive: longer than the leases of a
killed worker last."""
LEDGERS = ("redis", "dynamodb")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetTerms:
    """The terms of one process. `ledger`: "redis" or "dynamodb". `secrets`: the fingerprints of its
    secrets, newest first; empty if it knows no secret, as an operator need not.

    Raises ConveyorError(invalid_argument) for another ledger.
    """

    ledger: str
    bucket: str
    secrets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check(self.ledger)


async def fleet_item(table: Table) -> Item | None:
    """Read the fleet's terms, with `beats`; None if no process has written them yet."""
    return await table.get(FLEET)


async def agree(table: Table, terms: FleetTerms, *, works: bool) -> Item:
    """Confirm that this process works by the fleet's terms, writing them if there are none.

    Returns the item afterwards.
    Only a process that `works` keeps permits: it must have the fleet's ledger, and counts as a live
    worker. One secret in common is enough. Newer secrets are then added to the fleet's, since
    processes receive them one by one. Raises ConveyorError(conflict) if the fleet has other terms:
    the caller must not work.
    """
    known = " OR ".join(f"contains(secrets, :secret{at})" for at in range(len(terms.secrets)))
    conditions = ["attribute_not_exists(bucket_name) OR bucket_name = :bucket"]
    changes = ["shape = :shape", "bucket_name = :bucket"]
    values: dict[str, Plain] = {f"secret{at}": secret for at, secret in enumerate(terms.secrets)}
    if works:
        conditions.append("attribute_not_exists(ledger) OR ledger = :kind")
    changes.append("ledger = :kind" if works else "ledger = if_not_exists(ledger, :kind)")
    if known:
        conditions.append(f"attribute_not_exists(secrets) OR {known}")
        changes.append("secrets = if_not_exists(secrets, :secrets)")
        values["secrets"] = list(terms.secrets)
    try:
        item = await table.update(
            FLEET,
            f"SET {', '.join(changes)} ADD beats :beats",
            condition=_all(conditions),
            shape=TABLE_SHAPE,
            kind=terms.ledger,
            bucket=terms.bucket,
            beats=int(works),
            **values,
        )
    except AwsRefused as refused:
        if not refused.is_condition:
            raise
        problem = difference(conflicting_item(refused) or {}, terms, works=works)
        text = problem or "this process and its fleet have different settings"
        raise ConveyorError(ErrorCode.CONFLICT, text) from None
    return await _add_new_secrets(table, item, terms)


async def _add_new_secrets(table: Table, item: Item, terms: FleetTerms) -> Item:
    """Put secrets that are new to the fleet before those that it knows."""
    fresh: list[Plain] = [secret for secret in terms.secrets if secret not in item["secrets"]]
    if not fresh:
        return item
    return await table.update(
        FLEET,
        "SET secrets = list_append(:fresh, secrets)",
        condition="attribute_exists(secrets)",
        fresh=fresh,
    )


def _all(conditions: list[str]) -> str:
    """Join conditions with AND. DynamoDB refuses redundant parentheses."""
    return conditions[0] if len(conditions) == 1 else f"({') AND ('.join(conditions)})"


def difference(item: Item, terms: FleetTerms, *, works: bool) -> str | None:
    """Say which setting of a process disagrees with its fleet; None if all match."""
    ledger, bucket = item.get("ledger", terms.ledger), item.get("bucket_name", terms.bucket)
    if works and ledger != terms.ledger:
        return (
            f"this fleet keeps its permits in {ledger}, but this process is set to {terms.ledger}"
        )
    if bucket != terms.bucket:
        return (
            f"this fleet keeps its bodies in the bucket {bucket}, but this process is set to"
            f" {terms.bucket}"
        )
    known = item.get("secrets", terms.secrets)
    if terms.secrets and not set(terms.secrets) & set(known):
        return "this fleet uses another CONVEYOR_SECRET: it shares no secret with this process"
    return None


def names_callers_anew(item: Item, terms: FleetTerms) -> bool:
    """Return True if the secret for callers' ids differs from the fleet's first one: callers then
    get new ids, and no longer see their jobs."""
    known = item.get("secrets")
    return bool(known and terms.secrets and known[-1] != terms.secrets[-1])


async def nobody_works(
    table: Table, *, watch: float, watching: Callable[[], None] = lambda: None
) -> bool:
    """Watch for `watch` seconds; return True if no worker confirms the terms meanwhile.

    Return True at once if no worker ever did. Calls `watching` before it waits.
    """
    before = await table.get(FLEET)
    if before is None or not before.get("beats"):
        return True
    watching()
    await table.clock.sleep(watch)
    after = await table.get(FLEET)
    return after is None or after["beats"] == before["beats"]


async def change_ledger(
    table: Table, kind: str, *, watching: Callable[[], None] = lambda: None
) -> bool:
    """Change the ledger of the fleet, after `WATCH` seconds without a confirmation of a worker.

    Returns False if the fleet has that ledger already. Calls `watching` before it waits. Raises
    ConveyorError: (conflict) if a worker is alive, (unavailable) if there is no table. A worker
    that was suspended all that time fails in its next `agree`.
    """
    _check(kind)
    return await _change(table, {"ledger": kind}, watching)


async def rebind(
    table: Table, terms: FleetTerms, *, watching: Callable[[], None] = lambda: None
) -> bool:
    """Change the bucket of the fleet, and its secrets if `terms` has any.

    Waits, returns and raises as `change_ledger` does.
    """
    wanted: dict[str, Plain] = {"bucket_name": terms.bucket}
    if terms.secrets:
        wanted["secrets"] = list(terms.secrets)
    return await _change(table, wanted, watching)


async def _change(table: Table, wanted: dict[str, Plain], watching: Callable[[], None]) -> bool:
    before = await _before_change(table)
    if before is not None and wanted.items() <= before.items():
        return False
    beats = 0 if before is None else before.get("beats", 0)
    if beats:
        watching()
        await table.clock.sleep(WATCH)
    changes = ", ".join(f"{name} = :{name}" for name in wanted)
    try:
        await table.update(
            FLEET,
            f"SET shape = :shape, beats = :beats, {changes}",
            condition="attribute_not_exists(beats) OR beats = :beats",
            shape=TABLE_SHAPE,
            beats=beats,
            **wanted,
        )
    except AwsRefused as refused:
        if not refused.is_condition:
            raise
        raise ConveyorError(
            ErrorCode.CONFLICT, "a worker is alive: stop all workers, then change the fleet"
        ) from None
    return True


async def _before_change(table: Table) -> Item | None:
    try:
        return await table.get(FLEET)
    except AwsRefused as refused:
        if refused.word != ABSENCES["dynamodb"]:
            raise
        text = f"there is no table {table.name} (conveyor admin init makes it)"
        raise ConveyorError(ErrorCode.UNAVAILABLE, text) from None


PAUSED_AT = "paused_at"
"""The attribute of the fleet's item that pauses it: the instant of the order."""


async def pause_fleet(table: Table) -> int | None:
    """Order that no worker starts anything new; return since when that was ordered already, None
    if it was not. Raises ConveyorError(unavailable) if there is no fleet."""
    return await _order(table, f"SET {PAUSED_AT} = if_not_exists({PAUSED_AT}, :now)")


async def resume_fleet(table: Table) -> int | None:
    """Take the order back; return since when it held, None if there was none. Raises as
    `pause_fleet` does."""
    return await _order(table, f"REMOVE {PAUSED_AT}")


async def _order(table: Table, change: str) -> int | None:
    """Change the order in the fleet's item, and return the one before."""
    before = await _before_change(table)
    if before is None:
        text = "this environment has no fleet (conveyor admin init makes it)"
        raise ConveyorError(ErrorCode.UNAVAILABLE, text)
    values: dict[str, Plain] = {"now": table.clock.now()} if ":now" in change else {}
    await table.update(FLEET, change, condition="attribute_exists(pk)", **values)
    since: int | None = before.get(PAUSED_AT)
    return since


def _check(kind: str) -> None:
    if kind not in LEDGERS:
        raise ConveyorError(
            ErrorCode.INVALID_ARGUMENT,
            f"the ledger must be one of {', '.join(LEDGERS)}, not {kind}",
        )


T = TypeVar("T")
Check = Callable[[Aws, ProdOptions], Awaitable[None]]

_log = logging.getLogger("conveyor.roles")
_permits_log = logging.getLogger("conveyor.permits")


def production_resources(options: ProdOptions) -> dict[str, str]:
    """Name the deployed resource of each service as the operator knows it."""
    return {
        "dynamodb": f"table {options.table}",
        "s3": f"bucket {options.bucket}",
        "sqs": f"queues {prefix(options.environment)}…",
    }


def terms(options: ProdOptions) -> FleetTerms:
    """Return the terms of a process with these options."""
    secrets = filter(None, (options.root_secret, *options.older_secrets))
    return FleetTerms(
        ledger=options.ledger,
        bucket=options.bucket,
        secrets=tuple(fingerprint(secret) for secret in secrets),
    )


async def start(
    aws: Aws, table: Table, options: ProdOptions, *, works: bool, pause: FleetPause | None = None
) -> Callable[[], Awaitable[None]]:
    """Make all checks, and return the function to be called every `BEAT` seconds from then on. It
    tells `pause` whether an operator has paused the fleet.

    Raises ConveyorError, and so does that function: (unavailable) if AWS does not answer, refuses,
    or lacks table, bucket or queue; (conflict) if the fleet has other terms.
    """
    own, pause = terms(options), pause or FleetPause()

    async def beat() -> None:
        item = await _for_operator(agree(table, own, works=works))
        pause.hear(item.get(PAUSED_AT))

    item = await _for_operator(agree(table, own, works=works))
    pause.hear(item.get(PAUSED_AT))
    if names_callers_anew(item, own):
        _log.warning(
            "the last secret in CONVEYOR_SECRET differs from the one this fleet was created with:"
            " existing callers can no longer see their jobs"
        )

    await _check_resources(aws, options)
    return beat


async def _check_resources(aws: Aws, options: ProdOptions) -> None:
    """Report all problems with the deployed resources, always in the same order: a wrong
    environment, for example, fails in both checks, whichever answers first."""
    found: dict[Check, ConveyorError] = {}

    async def run(check: Check) -> None:
        try:
            await _for_operator(check(aws, options))
        except ConveyorError as error:
            found[check] = error

    await for_each(run, _CHECKS)
    problems = [found[check] for check in _CHECKS if check in found]
    if problems:
        text = "; ".join(problem.detail for problem in problems)
        raise ConveyorError(problems[0].code, text)


async def check_redis(server: RedisServer, options: ProdOptions, *, works: bool) -> None:
    """Log what this process cannot do if Redis does not answer. Raises nothing: it may come up
    later."""
    if works and options.ledger == "redis":
        without = "no permits can be acquired until it does"
    elif not works and options.rate_limit:
        without = "requests are not rate-limited until it does"
    else:
        return
    try:
        await server.ping()
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
        if refused.word not in NO_QUEUE:
            raise
        raise _absent(f"queue {name}") from None


_CHECKS: tuple[Check, ...] = (_bucket, _control_queue)


def _absent(what: str) -> ConveyorError:
    return ConveyorError(
        ErrorCode.UNAVAILABLE, f"there is no {what} (conveyor admin init makes it)"
    )


async def _for_operator(call: Awaitable[T]) -> T:
    """Await a call; raise its refusals as errors that tell the operator what is wrong."""
    try:
        return await call
    except NotDeployed as error:
        raise ConveyorError(ErrorCode.UNAVAILABLE, error.problem) from None
    except AwsRefused as refused:
        raise ConveyorError(ErrorCode.UNAVAILABLE, describe(refused)) from None
