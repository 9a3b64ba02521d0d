"""The reasons why a live run waits, in the order in which they are told."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class RunWaitReason(StrEnum):
    """The one reason that is told is the first of these that holds."""

    PAUSED = "paused"
    INGESTING = "ingesting"
    NO_WORKER = "no_worker"
    QUEUE_LOST = "queue_lost"
    PERMITS_CLOSED = "permits_closed"
    BODIES_NOT_KEPT = "bodies_not_kept"
    GATEWAY_THROTTLED = "gateway_throttled"
    HOST_CLOSED = "host_closed"
    RETRY_BACKOFF = "retry_backoff"
    CLAIMS_HELD = "claims_held"
    MAX_INFLIGHT = "max_inflight"
    SLOTS = "slots"


class RunWait(msgspec.Struct, frozen=True, kw_only=True):
    """Why a live run waits: the first reason that holds, and the `others`.

    `since` and `until` are in milliseconds since the epoch; `until` is None where nobody knows.
    """

    reason: RunWaitReason
    since: int
    detail: str
    until: int | None = None
    others: tuple[RunWaitReason, ...] = ()
