"""Routes of webhooks."""

from __future__ import annotations

from starlette.responses import Response

from conveyor.http.request import Handler, RequestContext, json_response, read_small_body


async def test(call: RequestContext) -> Response:
    """Post a test event to a receiver, and say what came of it."""
    body = await read_small_body(call.request)
    return json_response(await call.service.webhook_tests.test(call.caller_id, body))


WEBHOOK_ROUTES: dict[str, dict[str, Handler]] = {
    "/v1/webhook/test": {"POST": test},
}
