"""The operations, parameters and requests of webhooks in the OpenAPI document."""

from __future__ import annotations

from conveyor.domain.deliveries import DeliveryStatus
from conveyor.domain.errors import ErrorCode
from conveyor.domain.webhooks import MOST_WEBHOOK_URL, USUAL_EVENTS, EventType
from conveyor.http.openapi_operations import Operation
from conveyor.http.openapi_schemas import Schema, nullable
from conveyor.service.deliveries import MOST_REPLAYED
from conveyor.service.schemas import ULID_PATTERN

_STATES = [status.value for status in DeliveryStatus]
_URL: Schema = {
    "type": "string",
    "description": "An https URL, without user, password and fragment.",
    "minLength": 1,
    "maxLength": MOST_WEBHOOK_URL,
}
_SIGNATURE: Schema = {
    "type": "boolean",
    "description": "Whether to sign events with your active key.",
}
_MAY_SIGN = nullable({**_SIGNATURE, "default": False})
_EVENTS: Schema = {
    "type": ["array", "null"],
    "description": f"The events to send; null takes {' and '.join(USUAL_EVENTS)}.",
    "minItems": 1,
    "items": {"type": "string", "enum": [kind.value for kind in EventType]},
}

WEBHOOK_SCHEMAS: dict[str, Schema] = {
    "Webhook": {
        "type": "object",
        "description": "A receiver of a job's events.",
        "required": ["url"],
        "properties": {"url": _URL, "signature": _MAY_SIGN, "events": _EVENTS},
    },
    "PutWebhook": {
        "type": "object",
        "description": "The receiver of a job's events from now on. Events that are not named stay "
        "as they were.",
        "required": ["url", "signature"],
        "properties": {"url": _URL, "signature": _SIGNATURE, "events": _EVENTS},
    },
    "TestWebhookRequest": {
        "type": "object",
        "description": "A receiver of events.",
        "required": ["url"],
        "properties": {"url": _URL, "signature": _MAY_SIGN},
    },
    "ReplayWindow": {
        "type": "object",
        "description": "Deliveries in one state, made in a window of time.",
        "required": ["since"],
        "properties": {
            "status": nullable(
                {
                    "type": "string",
                    "description": "Their state.",
                    "enum": _STATES,
                    "default": DeliveryStatus.FAILED.value,
                }
            ),
            "since": {
                "type": "string",
                "format": "date-time",
                "description": "The begin of the window.",
            },
            "until": nullable(
                {
                    "type": "string",
                    "format": "date-time",
                    "description": "The end of the window; without it there is none.",
                }
            ),
        },
    },
}
"""Requests about webhooks."""

WEBHOOK_PARAMETERS: dict[str, Schema] = {
    "delivery_id": {
        "name": "delivery_id",
        "in": "path",
        "required": True,
        "description": "A delivery.",
        "schema": {"type": "string", "pattern": ULID_PATTERN},
    },
    "DeliveryStatus": {
        "name": "status",
        "in": "query",
        "required": False,
        "description": "Only deliveries in this state.",
        "schema": {"type": "string", "enum": _STATES},
    },
    "Since": {
        "name": "since",
        "in": "query",
        "required": False,
        "description": "Only those made at this time or later, as 2026-01-31T12:00:00Z.",
        "schema": {"type": "string", "format": "date-time"},
    },
}
"""Parameters of webhooks."""

_BAD_RECEIVER = (
    ErrorCode.INVALID_ARGUMENT,
    ErrorCode.CALLBACK_URL_MUST_BE_HTTPS,
    ErrorCode.CALLBACK_URL_UNRESOLVABLE,
    ErrorCode.WEBHOOK_SIGNING_REQUIRES_ACTIVE_KEY,
)
_BAD_BODY = (ErrorCode.PAYLOAD_TOO_LARGE, ErrorCode.UNSUPPORTED_MEDIA_TYPE)
_WEBHOOK = "/v1/jobs/{job_id}/webhook"
_DELIVERIES = "/v1/webhook/deliveries"
_DELIVERY = "/v1/webhook/deliveries/{delivery_id}"
_PAGING = ("DeliveryStatus", "Since", "Limit", "Cursor")

WEBHOOK_OPERATIONS = (
    Operation(
        method="get",
        path=_WEBHOOK,
        id="getJobWebhook",
        summary="Read the webhook of a job",
        answer="WebhookConfig",
        note="404 also where the job has none.",
        refusals=(ErrorCode.NOT_FOUND,),
    ),
    Operation(
        method="put",
        path=_WEBHOOK,
        id="putJobWebhook",
        summary="Set the webhook of a job",
        answer="WebhookConfig",
        body="PutWebhook",
        note="It counts from the next attempt on. A run that has ended before owes nothing.",
        refusals=(*_BAD_RECEIVER, ErrorCode.NOT_FOUND, *_BAD_BODY),
    ),
    Operation(
        method="delete",
        path=_WEBHOOK,
        id="deleteJobWebhook",
        summary="Remove the webhook of a job, and drop what is still owed",
        success=204,
        media_type=None,
        note="Idempotent.",
        refusals=(ErrorCode.NOT_FOUND,),
    ),
    Operation(
        method="get",
        path=f"{_WEBHOOK}/deliveries",
        id="listJobDeliveries",
        summary="List the deliveries of a job, newest first",
        answer="DeliveriesPage",
        parameters=_PAGING,
        refusals=(ErrorCode.INVALID_ARGUMENT, ErrorCode.NOT_FOUND),
    ),
    Operation(
        method="post",
        path="/v1/webhook/test",
        id="testWebhook",
        summary="Post a test event to a receiver",
        answer="TestWebhookResponse",
        body="TestWebhookRequest",
        note="200 once the event was posted, whatever the receiver did with it.",
        refusals=(*_BAD_RECEIVER, ErrorCode.RATE_LIMITED, *_BAD_BODY),
    ),
    Operation(
        method="get",
        path=_DELIVERIES,
        id="listDeliveries",
        summary="List your deliveries, newest first",
        answer="DeliveriesPage",
        parameters=_PAGING,
        refusals=(ErrorCode.INVALID_ARGUMENT,),
    ),
    Operation(
        method="post",
        path=f"{_DELIVERIES}/replay",
        id="replayDeliveries",
        summary=f"Send the events of a window again, at most {MOST_REPLAYED:,} a call",
        success=202,
        answer="Replayed",
        body="ReplayWindow",
        parameters=("IdempotencyKey",),
        refusals=(ErrorCode.INVALID_ARGUMENT, ErrorCode.IDEMPOTENCY_KEY_CONFLICT, *_BAD_BODY),
    ),
    Operation(
        method="get",
        path=_DELIVERY,
        id="getDelivery",
        summary="Read a delivery with its bytes and attempts",
        answer="LoggedDelivery",
        refusals=(ErrorCode.NOT_FOUND,),
    ),
    Operation(
        method="post",
        path=f"{_DELIVERY}/replay",
        id="replayDelivery",
        summary="Send an event again: the same id, the same bytes, a new ladder of attempts",
        success=202,
        answer="Delivery",
        parameters=("IdempotencyKey",),
        note="409 for a test event, where no webhook asks for it, or the run was deleted.",
        refusals=(
            ErrorCode.INVALID_ARGUMENT,
            ErrorCode.NOT_FOUND,
            ErrorCode.CONFLICT,
            ErrorCode.IDEMPOTENCY_KEY_CONFLICT,
        ),
    ),
    Operation(
        method="post",
        path=f"{_DELIVERY}/headers",
        id="signDelivery",
        summary="Write the headers of an event as if it were sent now",
        answer="DeliveryHeaders",
        note="Signed if the webhook asks for it; where there is none any more, if you have a key.",
        refusals=(ErrorCode.NOT_FOUND,),
    ),
)
"""Operations of webhooks and their deliveries."""
