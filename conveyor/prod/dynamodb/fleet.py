"""What all processes of a fleet have to agree on: where permits and bodies are kept, and by which
secrets callers are named and keys are sealed.

Two ledgers would grant a job's limit twice; a body in another bucket is found by nobody; a job that
another secret signed for belongs to nobody. So the terms are written in the store by the first who
comes, and every process says again and again, under the condition that they still are, that it
works by them: `agree` at the start, and then every `BEAT` seconds. `beats` counts the words of
workers. An operator may change the terms while nobody says them: that is watched on the counter
alone, no clock is compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from conveyor.domain.api_keys import derive_key
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.aws.refusals import ABSENT
from conveyor.prod.dynamodb.items import Item, Table, met
from conveyor.prod.dynamodb.keys import FLEET
from conveyor.prod.dynamodb.table import ROW_SHAPE
from conveyor.prod.dynamodb.values import Plain

BEAT = 10.0
"""Seconds between two words of a worker."""
WATCH = 60.0
"""Seconds without any, after which no worker is taken to be alive: longer than the leases of one
that was killed."""
LEDGERS = ("redis", "dynamodb")
FINGERPRINT_DIGITS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
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


async def agree(table: Table, terms: Terms, *, works: bool) -> Item:
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
        problem = difference(met(refused) or {}, terms, works=works)
        text = problem or "this fleet works by other terms than this process"
        raise ConveyorError(ErrorCode.CONFLICT, text) from None
    return await _noted(table, item, terms)


async def _noted(table: Table, item: Item, terms: Terms) -> Item:
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


def difference(item: Item, terms: Terms, *, works: bool) -> str | None:
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


def names_callers_anew(item: Item, terms: Terms) -> bool:
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
    table: Table, terms: Terms, *, watching: Callable[[], None] = lambda: None
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
        if refused.word != ABSENT["dynamodb"]:
            raise
        text = f"there is no table {table.name} (conveyor admin init makes it)"
        raise ConveyorError(ErrorCode.UNAVAILABLE, text) from None


def _check(kind: str) -> None:
    if kind not in LEDGERS:
        raise ConveyorError(
            ErrorCode.INVALID_ARGUMENT, f"a ledger is one of {', '.join(LEDGERS)}, not {kind}"
        )
