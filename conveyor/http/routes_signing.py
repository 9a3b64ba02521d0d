"""Routes of the keys that sign events."""

from __future__ import annotations

from starlette.responses import Response

from conveyor.http.request import Handler, RequestContext, json_response


async def list_keys(call: RequestContext) -> Response:
    """Show the caller's keys without their secrets."""
    return json_response(await call.service.rotations.list_keys(call.caller_id))


async def rotate(call: RequestContext) -> Response:
    """Make the first key, or a candidate; the answer alone holds its secret, so nobody may store
    it."""
    made = await call.service.rotations.rotate(call.caller_id)
    answer = json_response(made, status=201)
    answer.headers["Cache-Control"] = "no-store"
    return answer


async def cancel(call: RequestContext) -> Response:
    """Remove the candidate."""
    await call.service.rotations.cancel(call.caller_id)
    return Response(status_code=204)


async def finalize(call: RequestContext) -> Response:
    """Let the candidate sign."""
    return json_response(await call.service.rotations.finalize(call.caller_id))


SIGNING_ROUTES: dict[str, dict[str, Handler]] = {
    "/v1/hmac/keys": {"GET": list_keys},
    "/v1/hmac/keys/rotate": {"POST": rotate, "DELETE": cancel},
    "/v1/hmac/keys/rotate/finalize": {"POST": finalize},
}
