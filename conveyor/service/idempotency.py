"""Runs a request with an idempotency key once, and repeats the stored answer from then on."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import anyio
import msgspec

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.clock import Clock
from conveyor.ports.records import (
    ClaimedKey,
    Idempotency,
    IdempotencyScope,
    KeyClaim,
    KeyInUse,
    KeyMismatch,
    StoredResponse,
)

_log = logging.getLogger("conveyor.service")


class KeyedRequest(msgspec.Struct, frozen=True):
    """One use of an idempotency key.

    `scope` is a digest of caller, method, path and key; `fingerprint` the sha256 of the raw body.
    """

    scope: str
    fingerprint: bytes


class IdempotencyClaim(msgspec.Struct, frozen=True):
    """The permission to do the work of one request.

    `created_id` is the id of the thing to make; `once` goes to the write; `taken_over` says that an
    earlier request may already have made it.
    """

    created_id: str
    once: IdempotencyScope | None = None
    taken_over: bool = False


class Reply(msgspec.Struct, frozen=True):
    """An answer, and whether it repeats an earlier one."""

    answer: StoredResponse
    replayed: bool = False


Work = Callable[[IdempotencyClaim], Awaitable[StoredResponse]]


class IdempotentRequests:
    """Claims idempotency keys, and releases them if the work fails."""

    def __init__(self, idempotency: Idempotency, clock: Clock, *, claim: float, ttl: float) -> None:
        self._idempotency = idempotency
        self._clock = clock
        self._claim_ms = round(claim * 1_000)
        self._ttl_ms = round(ttl * 1_000)

    async def answer(
        self, request: KeyedRequest | None, work: Work, *, found: Work | None = None
    ) -> Reply:
        """Return the stored answer, or do `work` now and return its answer.

        Work once begun is completed even if the request is cancelled. If `work` raises, the key is
        released and the error raised again. If it meets a conflict and the claim was taken over,
        `found` builds the answer from the result of the earlier request. Raises
        ConveyorError(idempotency_key_conflict) if the key is in use, or was used with another body.
        """
        with anyio.CancelScope(shield=True):
            if request is None:
                given = Reply(await work(IdempotencyClaim(self._clock.new_id())))
            else:
                given = await self._keyed(request, work, found)
        return given

    async def keep(self, claim: IdempotencyClaim, answer: StoredResponse) -> None:
        """Store the answer of work whose writes cannot store it."""
        if claim.once is not None:
            await self._idempotency.answer_idempotency_key(
                claim.once.scope, created_id=claim.created_id, answer=answer
            )

    async def _keyed(self, request: KeyedRequest, work: Work, found: Work | None) -> Reply:
        claimed, lapses_at = await self._claim(request)
        match claimed:
            case StoredResponse() as answer:
                return Reply(answer, replayed=True)
            case KeyInUse():
                raise _conflict("the first request with this Idempotency-Key is still running")
            case KeyMismatch():
                raise _conflict("this Idempotency-Key was used with another body")
            case ClaimedKey() as claim:
                granted = IdempotencyClaim(
                    claim.created_id, IdempotencyScope(request.scope), claim.taken_over
                )
        try:
            return Reply(await work(granted))
        except BaseException as error:
            if _is_conflict(error):
                again, until = await self._claim(request)
                if isinstance(again, StoredResponse):
                    return Reply(again, replayed=True)
                if granted.taken_over and found is not None:
                    return Reply(await found(granted))
                if isinstance(again, ClaimedKey):
                    claim, lapses_at = again, until
            await self._release(request.scope, claim.created_id, lapses_at)
            raise

    async def _claim(self, request: KeyedRequest) -> tuple[KeyClaim, int]:
        """Try to claim the key now; return the outcome and the time when the claim lapses."""
        now = self._clock.now()
        lapses_at = now + self._claim_ms
        claim = await self._idempotency.claim_idempotency_key(
            request.scope,
            fingerprint=request.fingerprint,
            created_id=self._clock.new_id(),
            now=now,
            lapses_at=lapses_at,
            expires_at=now + self._ttl_ms,
        )
        return claim, lapses_at

    async def _release(self, scope: str, created_id: str, lapses_at: int) -> None:
        if self._clock.now() >= lapses_at:
            return  # The next claimant finds out whether the thing was made.
        try:
            await self._idempotency.release_idempotency_key(
                scope, created_id=created_id, lapses_at=lapses_at
            )
        except Exception as error:
            _log.warning(
                "an idempotency key stays claimed until it lapses",
                extra={"error": type(error).__name__},
            )


def _is_conflict(error: BaseException) -> bool:
    return isinstance(error, ConveyorError) and error.code is ErrorCode.CONFLICT


def _conflict(detail: str) -> ConveyorError:
    return ConveyorError(ErrorCode.IDEMPOTENCY_KEY_CONFLICT, detail)
