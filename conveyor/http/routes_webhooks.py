"""Routes of webhooks, and of the log of their events."""

from __future__ import annotations

from starlette.responses import Response

from conveyor.domain.deliveries import DeliveryStatus
from conveyor.http.request import (
    NO_BODY,
    Handler,
    RequestContext,
    cursor,
    given_response,
    instant,
    json_response,
    keyed_request,
    page_size,
    read_small_body,
    read_small_json,
    word,
)
from conveyor.service.jobs import DEFAULT_PAGE, MAX_PAGE


async def get_webhook(call: RequestContext) -> Response:
    """Read the webhook of a job."""
    return json_response(await call.service.webhooks.get(call.caller_id, call.job_id))


async def put_webhook(call: RequestContext) -> Response:
    """Set the webhook of a job."""
    job_id = call.job_id
    body = await read_small_body(call.request)
    return json_response(await call.service.webhooks.put(call.caller_id, job_id, body))


async def delete_webhook(call: RequestContext) -> Response:
    """Remove the webhook of a job."""
    await call.service.webhooks.delete(call.caller_id, call.job_id)
    return Response(status_code=204)


async def test(call: RequestContext) -> Response:
    """Post a test event to a receiver, and say what came of it."""
    body = await read_small_body(call.request)
    return json_response(await call.service.webhook_tests.test(call.caller_id, body))


async def list_deliveries(call: RequestContext) -> Response:
    """List a page of deliveries, those of a job if the path names one."""
    params = call.request.query_params
    status = word(params, "status", [status.value for status in DeliveryStatus])
    page = await call.service.deliveries.list_deliveries(
        call.caller_id,
        call.job_id if "job_id" in call.request.path_params else None,
        status=DeliveryStatus(status) if status is not None else None,
        since=instant(params, "since") or 0,
        cursor=cursor(params),
        limit=page_size(params, default=DEFAULT_PAGE, most=MAX_PAGE),
    )
    return json_response(page)


async def get_delivery(call: RequestContext) -> Response:
    """Read a delivery with its bytes and attempts."""
    found = await call.service.deliveries.get_delivery(call.caller_id, call.delivery_id)
    return json_response(found)


async def replay(call: RequestContext) -> Response:
    """Send an event again."""
    delivery_id = call.delivery_id
    keyed = keyed_request(call.request, call.caller_id, NO_BODY)
    return given_response(
        await call.service.replays.replay(call.caller_id, delivery_id, keyed=keyed)
    )


async def replay_window(call: RequestContext) -> Response:
    """Send the events of a window again."""
    body = await read_small_json(call.request)
    keyed = keyed_request(call.request, call.caller_id, body)
    return given_response(
        await call.service.replays.replay_window(call.caller_id, body.joined(), keyed=keyed)
    )


async def sign(call: RequestContext) -> Response:
    """Write the headers of an event as if it were sent now."""
    return json_response(await call.service.deliveries.sign(call.caller_id, call.delivery_id))


_DELIVERY = "/v1/webhook/deliveries/{delivery_id}"

WEBHOOK_ROUTES: dict[str, dict[str, Handler]] = {
    "/v1/jobs/{job_id}/webhook": {
        "GET": get_webhook,
        "PUT": put_webhook,
        "DELETE": delete_webhook,
    },
    "/v1/jobs/{job_id}/webhook/deliveries": {"GET": list_deliveries},
    "/v1/webhook/test": {"POST": test},
    "/v1/webhook/deliveries": {"GET": list_deliveries},
    "/v1/webhook/deliveries/replay": {"POST": replay_window},
    _DELIVERY: {"GET": get_delivery},
    f"{_DELIVERY}/replay": {"POST": replay},
    f"{_DELIVERY}/headers": {"POST": sign},
}
