"""Routes of schedules."""

from __future__ import annotations

from starlette.responses import Response

from conveyor.http.request import (
    Handler,
    RequestContext,
    cursor,
    json_response,
    page_size,
    read_small_body,
)
from conveyor.service.jobs import DEFAULT_PAGE, MAX_PAGE


async def show(call: RequestContext) -> Response:
    """Show the schedule of a job and its next fires."""
    return json_response(await call.service.schedules.show(call.caller_id, call.job_id))


async def replace(call: RequestContext) -> Response:
    """Replace the schedule of a job."""
    job_id = call.job_id
    await call.service.schedules.require(call.caller_id, job_id)
    body = await read_small_body(call.request)
    return json_response(await call.service.schedules.replace(call.caller, job_id, body))


async def set_state(call: RequestContext) -> Response:
    """Pause or resume the schedule of a job."""
    job_id = call.job_id
    await call.service.schedules.require(call.caller_id, job_id)
    body = await read_small_body(call.request)
    return json_response(await call.service.schedules.set_state(call.caller, job_id, body))


async def list_fires(call: RequestContext) -> Response:
    """List what became of the fires of a job."""
    params = call.request.query_params
    page = await call.service.schedules.list_fires(
        call.caller_id,
        call.job_id,
        cursor=cursor(params),
        limit=page_size(params, default=DEFAULT_PAGE, most=MAX_PAGE),
    )
    return json_response(page)


async def preview(call: RequestContext) -> Response:
    """Show the next fires of a schedule that is not saved."""
    body = await read_small_body(call.request)
    return json_response(call.service.schedules.preview(body))


SCHEDULE_ROUTES: dict[str, dict[str, Handler]] = {
    "/v1/jobs/{job_id}/schedule": {"GET": show, "PUT": replace},
    "/v1/jobs/{job_id}/schedule/state": {"POST": set_state},
    "/v1/jobs/{job_id}/schedule/fires": {"GET": list_fires},
    "/v1/schedule/preview": {"POST": preview},
}
