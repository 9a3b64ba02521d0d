"""Routes of schedules."""

from __future__ import annotations

from starlette.responses import Response

from conveyor.http.request import Handler, RequestContext, json_response, read_small_body


async def preview(call: RequestContext) -> Response:
    """Show the next fires of a schedule that is not saved."""
    body = await read_small_body(call.request)
    return json_response(call.service.schedules.preview(body))


SCHEDULE_ROUTES: dict[str, dict[str, Handler]] = {
    "/v1/schedule/preview": {"POST": preview},
}
