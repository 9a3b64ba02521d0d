"""Idempotency keys: claimed, taken over, released, and removed when they expire.

`StoredResponses` stores the response of an idempotent request in the very transaction that does its
work.
"""

from __future__ import annotations

from typing import Any

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.records import (
    ClaimedKey,
    IdempotencyScope,
    KeyClaim,
    KeyInUse,
    KeyMismatch,
    StoredResponse,
)
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb.client import Item, Table, conflicting_item, contention_error
from conveyor.prod.dynamodb.run_rows import TRIES
from conveyor.prod.dynamodb.schema import ROW_SHAPE, Key, idempotency_key


class StoredResponses:
    """Stores and finds responses under idempotency keys."""

    def __init__(self, table: Table) -> None:
        self._table = table

    async def lookup(
        self, once: IdempotencyScope | None
    ) -> StoredResponse | IdempotencyScope | None:
        """Read a key strongly: return its response if the work is done; else the key itself, for
        `answer_parts`; None if no key was given or it is gone."""
        if once is None:
            return None
        item = await self._table.get(idempotency_key(once.scope))
        if item is None:
            return None
        return once if (answer := read_answer(item)) is None else answer

    async def unanswered(self, once: IdempotencyScope | None) -> IdempotencyScope | None:
        """Return the key as `lookup` does. Raises ConveyorError(conflict) if it is answered."""
        found = await self.lookup(once)
        if isinstance(found, StoredResponse):
            raise ConveyorError(ErrorCode.CONFLICT, "the request has been answered already")
        return found

    def answer_parts(
        self, once: IdempotencyScope | None, answer: StoredResponse
    ) -> list[dict[str, Any]]:
        """Describe the write of a response under its key, for a transaction. It is refused, and
        with it the whole transaction, if the key is gone or answered; the caller then looks it up
        again."""
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
    """Decode the response that a key's item holds, if any."""
    status = item.get("answer_status")
    return None if status is None else StoredResponse(status, item["answer_body"])


class DynamoIdempotency:
    """The idempotency port. `claimed_by` holds the token of the last claim, by which a call whose
    answer was lost recognises its own write."""

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
                # This call's own claim: an earlier try wrote it, and its answer was lost.
                return ClaimedKey(found["created_id"], taken_over=found["created_id"] != created_id)
            if found["fingerprint"] != fingerprint:
                return KeyMismatch()
            if (answer := read_answer(found)) is not None:
                return answer
            if found["lapses_at"] > now:
                return KeyInUse()
            if await self._take_over(key, found, claim):
                return ClaimedKey(found["created_id"], taken_over=True)
        raise contention_error()

    async def release_idempotency_key(self, scope: str, *, created_id: str, lapses_at: int) -> None:
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

    async def answer_idempotency_key(
        self, scope: str, *, created_id: str, answer: StoredResponse
    ) -> None:
        try:
            await self._table.update(
                idempotency_key(scope),
                "SET answer_status = :status, answer_body = :body",
                condition="attribute_not_exists(answer_status) AND created_id = :created_id",
                created_id=created_id,
                status=answer.status,
                body=answer.body,
            )
        except AwsRefused as refused:
            if not refused.is_condition:
                raise

    async def _write_new(self, key: Key, fresh: Item, now: int) -> Item | None:
        """Write a key that is absent or expired; else return the existing one."""
        condition = "attribute_not_exists(pk) OR expires_at <= :now"
        try:
            await self._table.put(key, fresh, condition=condition, now=now)
        except AwsRefused as refused:
            found = conflicting_item(refused)
            if not refused.is_condition or found is None:
                raise
            return found
        return None

    async def _take_over(self, key: Key, found: Item, claim: Item) -> bool:
        """Take over a lapsed claim; return False if another call did so first."""
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
    """Convert to seconds, rounded up so that nothing is removed early."""
    return -(-milliseconds // 1_000)
