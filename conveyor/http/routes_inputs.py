"""Routes of slots for files of tasks."""

from __future__ import annotations

from starlette.responses import Response

from conveyor.http.body import read_json_body
from conveyor.http.call import Call, Handler, json_response


async def create(call: Call) -> Response:
    """Make a slot; the answer says where its file goes."""
    body = await read_json_body(call.request)
    return json_response(
        await call.service.inputs.create(call.caller_id, body.joined()), status=201
    )


ROUTES: dict[str, dict[str, Handler]] = {
    "/v1/job_inputs": {"POST": create},
}
