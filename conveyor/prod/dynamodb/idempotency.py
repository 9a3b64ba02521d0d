"""Idempotency keys: claimed, taken over, released, and forgotten when they expire.

The answer of an idempotent request, stored by the very transaction that does its work.
"""

from __future__ import annotations

from typing import Any

from conveyor.ports.records import (
    ClaimedKey,
    IdempotencyScope,
    KeyClaim,
    KeyInUse,
    KeyMismatch,
    StoredResponse,
)
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb.client import Item, Table, changed_too_often, condition_met
from conveyor.prod.dynamodb.run_rows import TRIES
from conveyor.prod.dynamodb.schema import ROW_SHAPE, Key, idempotency_key


class StoredResponses:
    """Answers under idempotency keys."""

    def __init__(self, table: Table) -> None:
        self._table = table

    async def look(self, once: IdempotencyScope | None) -> StoredResponse | IdempotencyScope | None:
        """What stands under a key, strongly read: its answer, if its work is done already; else the
        key itself, for `parts`; None where no key was given, or there is none (any more)."""
        if once is None:
            return None
        item = await self._table.get(idempotency_key(once.scope))
        if item is None:
            return None
        return once if (answer := read_answer(item)) is None else answer

    def parts(self, once: IdempotencyScope | None, answer: StoredResponse) -> list[dict[str, Any]]:
        """What a transaction has to hold so that the answer stands under its key, or nothing of it
        happens: that is refused where the key is gone or answered. Look again then."""
        if once is None:
            return []
        return [
            self._table.update_part(
                idempotency_key(once.scope),
                "SET answer_status = :status, answer_body = :body",
                condition="attribute_exists(pk) AND attribute_not_exists(answer_status)",
                status=answer.status,
                body=answer.body,
            )
        ]


def read_answer(item: Item) -> StoredResponse | None:
    """The answer that a key's item holds."""
    status = item.get("answer_status")
    return None if status is None else StoredResponse(status, item["answer_body"])


class DynamoIdempotency:
    """The idempotency port. `claimed_by` on a key is the token of the call that claimed it last, so
    that one whose answer was lost finds itself."""

    def __init__(self, table: Table) -> None:
        self._table = table

    async def claim_idempotency_key(
        self,
        scope: str,
        *,
        fingerprint: bytes,
        created_id: str,
        now: int,
        lapses_at: int,
        expires_at: int,
    ) -> KeyClaim:
        """Claim a key for one request, or learn what became of it."""
        token = self._table.clock.new_id()
        claim: Item = {
            "lapses_at": lapses_at,
            "expires_at": expires_at,
            "ttl": _whole_seconds(expires_at),
            "claimed_by": token,
        }
        fresh: Item = {
            "shape": ROW_SHAPE,
            "fingerprint": fingerprint,
            "created_id": created_id,
            **claim,
        }
        key = idempotency_key(scope)
        for _ in range(TRIES):
            found = await self._write_new(key, fresh, now)
            if found is None:
                return ClaimedKey(created_id, taken_over=False)
            if found["claimed_by"] == token:
                # One of the writes here was carried out, and its answer lost.
                return ClaimedKey(found["created_id"], taken_over=found["created_id"] != created_id)
            if found["fingerprint"] != fingerprint:
                return KeyMismatch()
            if (answer := read_answer(found)) is not None:
                return answer
            if found["lapses_at"] > now:
                return KeyInUse()
            if await self._take_over(key, found, claim):
                return ClaimedKey(found["created_id"], taken_over=True)
        raise changed_too_often()

    async def release_idempotency_key(self, scope: str, *, created_id: str, lapses_at: int) -> None:
        """Free a key that has no answer, under the very claim that was made of it."""
        try:
            await self._table.delete(
                idempotency_key(scope),
                condition="attribute_not_exists(answer_status) "
                "AND created_id = :created_id AND lapses_at = :lapses_at",
                created_id=created_id,
                lapses_at=lapses_at,
            )
        except AwsRefused as refused:
            if not refused.is_condition:
                raise

    async def _write_new(self, key: Key, fresh: Item, now: int) -> Item | None:
        """Write a key where there is none that counts; else the one that is there."""
        condition = "attribute_not_exists(pk) OR expires_at <= :now"
        try:
            await self._table.put(key, fresh, condition=condition, now=now)
        except AwsRefused as refused:
            found = condition_met(refused)
            if not refused.is_condition or found is None:
                raise
            return found
        return None

    async def _take_over(self, key: Key, found: Item, claim: Item) -> bool:
        """Go on under a lapsed claim; False where it is not that one any more."""
        try:
            await self._table.update(
                key,
                "SET lapses_at = :lapses_at, expires_at = :expires_at, #ttl = :ttl, "
                "claimed_by = :claimed_by",
                condition="claimed_by = :earlier AND attribute_not_exists(answer_status)",
                earlier=found["claimed_by"],
                **claim,
            )
        except AwsRefused as refused:
            if not refused.is_condition:
                raise
            return False
        return True


def _whole_seconds(milliseconds: int) -> int:
    """Rounded up: nothing is removed too early."""
    return -(-milliseconds // 1_000)
