"""What a process looks at before it works: that it is of this fleet, and that all is there.

Whatever is missing would else be found by the first task, and only where it is needed.

What all processes of a fleet have to agree on: where permits and bodies are kept, and by which
secrets callers are named and keys are sealed.

Two ledgers would grant a job's limit twice; a body in another bucket is found by nobody; a job that
another secret signed for belongs to nobody. So the terms are written in the store by the first who
comes, and every process says again and again, under the condition that they still are, that it
works by them: `agree` at the start, and then every `BEAT` seconds. `beats` counts the words of
workers. An operator may change the terms while nobody says them: that is watched on the counter
alone, no clock is compared.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from conveyor.aio.concurrency import for_each
from conveyor.domain.api_keys import derive_key
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.queues import CONTROL_QUEUE
from conveyor.prod.aws.calls import Aws, AwsRefused
from conveyor.prod.aws.refusals import ABSENCES, NotDeployed, describe
from conveyor.prod.dynamodb.client import Item, Plain, Table, condition_met
from conveyor.prod.dynamodb.schema import FLEET, ROW_SHAPE
from conveyor.prod.options import ProdOptions
from conveyor.prod.redis.server import RedisServer
from conveyor.prod.s3.bucket import bucket_exists, own
from conveyor.prod.sqs.registry import NO_QUEUE, prefix

BEAT = 10.0
"""Seconds between two words of a worker."""
WATCH = 60.0
"""Seconds without any, after which no worker is taken to be alive: longer than the leases of one
that was killed."""
LEDGERS = ("redis", "dynamodb")
FINGERPRINT_DIGITS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetTerms:
    """What one process works by. `ledger`: "redis" or "dynamodb". `secrets`: the fingerprints of
    its secrets, newest first; none where it knows no secret, as an operator need not.

    Raises ConveyorError(invalid_argument) for another ledger.
    """

    ledger: str
    bucket: str
    secrets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check(self.ledger)


def fingerprint(secret: bytes) -> str:
    """What tells a root secret from another, and nothing else of it."""
    return derive_key(secret, "fingerprint").hex()[:FINGERPRINT_DIGITS]


async def fleet_item(table: Table) -> Item | None:
    """The terms of the fleet as they are written, with `beats`; None where none are yet."""
    return await table.get(FLEET)


async def agree(table: Table, terms: FleetTerms, *, works: bool) -> Item:
    """Write the terms where none are, and say that one works by them; the item afterwards.

    Only who `works` keeps permits, and so has to have the fleet's ledger, and counts as a worker
    that is alive. Secrets are those of one fleet where a single one is known to it: newer ones are
    noted then, since processes are given them one by one.
    Raises ConveyorError(conflict) where the fleet has other terms: the caller must not work.
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
            shape=ROW_SHAPE,
            kind=terms.ledger,
            bucket=terms.bucket,
            beats=int(works),
            **values,
        )
    except AwsRefused as refused:
        if not refused.is_condition:
            raise
        problem = difference(condition_met(refused) or {}, terms, works=works)
        text = problem or "this fleet works by other terms than this process"
        raise ConveyorError(ErrorCode.CONFLICT, text) from None
    return await _noted(table, item, terms)


async def _noted(table: Table, item: Item, terms: FleetTerms) -> Item:
    """Put secrets that the fleet does not know yet before those that it knows."""
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
    """All of them; DynamoDB refuses parentheses that change nothing."""
    return conditions[0] if len(conditions) == 1 else f"({') AND ('.join(conditions)})"


def difference(item: Item, terms: FleetTerms, *, works: bool) -> str | None:
    """In which of its terms a process is none of the fleet's; None: in none."""
    ledger, bucket = item.get("ledger", terms.ledger), item.get("bucket_name", terms.bucket)
    if works and ledger != terms.ledger:
        return f"this fleet keeps its permits in {ledger} and this process is set to {terms.ledger}"
    if bucket != terms.bucket:
        return (
            f"this fleet keeps its bodies in the bucket {bucket} and this process is set to"
            f" {terms.bucket}"
        )
    known = item.get("secrets", terms.secrets)
    if terms.secrets and not set(terms.secrets) & set(known):
        return "this fleet works by another CONVEYOR_SECRET: none of this process's is known to it"
    return None


def names_callers_anew(item: Item, terms: FleetTerms) -> bool:
    """Whether callers are told apart by another secret than when the fleet began: its jobs so far
    belong to nobody then."""
    known = item.get("secrets")
    return bool(known and terms.secrets and known[-1] != terms.secrets[-1])


async def nobody_works(
    table: Table, *, watch: float, watching: Callable[[], None] = lambda: None
) -> bool:
    """Whether no worker speaks for `watch` seconds; at once where none ever did. `watching` is
    called where it is to be waited for."""
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
    """Let the fleet keep its permits elsewhere, after `WATCH` seconds in which no worker spoke;
    False where it does already. `watching` is called where it is to be waited for.

    Raises ConveyorError: (conflict) where a worker is alive, (unavailable) where there is no table.
    A worker that was stopped for all that time and comes back is turned away by its next `agree`.
    """
    _check(kind)
    return await _change(table, {"ledger": kind}, watching)


async def rebind(
    table: Table, terms: FleetTerms, *, watching: Callable[[], None] = lambda: None
) -> bool:
    """Let the fleet have this bucket, and these secrets where there are any, as `change_ledger`
    does its ledger."""
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
            shape=ROW_SHAPE,
            beats=beats,
            **wanted,
        )
    except AwsRefused as refused:
        if not refused.is_condition:
            raise
        raise ConveyorError(
            ErrorCode.CONFLICT, "a worker is alive: stop all workers, then change the fleet's terms"
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


def _check(kind: str) -> None:
    if kind not in LEDGERS:
        raise ConveyorError(
            ErrorCode.INVALID_ARGUMENT, f"a ledger is one of {', '.join(LEDGERS)}, not {kind}"
        )


T = TypeVar("T")
Check = Callable[[Aws, ProdOptions], Awaitable[None]]

_log = logging.getLogger("conveyor.roles")
_permits_log = logging.getLogger("conveyor.permits")


def production_resources(options: ProdOptions) -> dict[str, str]:
    """What is deployed, by service, in the words of whoever runs the fleet."""
    return {
        "dynamodb": f"table {options.table}",
        "s3": f"bucket {options.bucket}",
        "sqs": f"queues {prefix(options.environment)}…",
    }


def terms(options: ProdOptions) -> FleetTerms:
    """What a process with these options works by."""
    secrets = filter(None, (options.root_secret, *options.older_secrets))
    return FleetTerms(
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

    await for_each(look, _CHECKS)
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
        if refused.word not in NO_QUEUE:
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
        raise ConveyorError(ErrorCode.UNAVAILABLE, describe(refused)) from None
