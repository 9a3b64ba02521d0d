"""Routes of runs, and of what came out of them."""

from __future__ import annotations

from starlette.responses import Response

from conveyor.http.request import Call, Handler, json_response, page_size, text, word
from conveyor.http.routes_files import content_response
from conveyor.service import results
from conveyor.service.jobs import DEFAULT_PAGE, MAX_PAGE


async def list_runs(call: Call) -> Response:
    """A page of a job's runs."""
    params = call.request.query_params
    page = await call.service.listing.list_runs(
        call.caller_id,
        call.job_id,
        cursor=text(params, "cursor"),
        limit=page_size(params, default=DEFAULT_PAGE, most=MAX_PAGE),
    )
    return json_response(page)


async def get_run(call: Call) -> Response:
    """One run."""
    run = await call.service.listing.get_run(call.caller_id, call.job_id, call.named_run_id)
    return json_response(run)


async def delete_run(call: Call) -> Response:
    """Delete a run, with everything in it."""
    await call.service.lifecycle.delete_run(call.caller_id, call.job_id, call.named_run_id)
    return Response(status_code=202)


async def list_results(call: Call) -> Response:
    """A page of results."""
    params = call.request.query_params
    page = await call.service.results.page(
        call.caller_id,
        call.job_id,
        call.run_id,
        status=word(params, "status", results.FILTERS) or "all",
        cursor=text(params, "cursor"),
        limit=page_size(params, default=results.DEFAULT_PAGE, most=results.MAX_PAGE),
    )
    return json_response(page)


async def content(call: Call) -> Response:
    """The body that a task brought back."""
    found = await call.service.results.content(
        call.caller_id, call.job_id, call.run_id, call.task_id
    )
    return await content_response(found, method=call.request.method)


async def history(call: Call) -> Response:
    """The attempts at a task."""
    events = await call.service.results.history(
        call.caller_id, call.job_id, call.run_id, call.task_id
    )
    return json_response(events)


ROUTES: dict[str, dict[str, Handler]] = {
    "/v1/jobs/{job_id}/runs": {"GET": list_runs},
    "/v1/jobs/{job_id}/runs/{run_id}": {"GET": get_run, "DELETE": delete_run},
    "/v1/jobs/{job_id}/results": {"GET": list_results},
    "/v1/jobs/{job_id}/runs/{run_id}/results": {"GET": list_results},
    "/v1/jobs/{job_id}/tasks/{task_id}/content": {"GET": content},
    "/v1/jobs/{job_id}/runs/{run_id}/tasks/{task_id}/content": {"GET": content},
    "/v1/jobs/{job_id}/tasks/{task_id}/history": {"GET": history},
    "/v1/jobs/{job_id}/runs/{run_id}/tasks/{task_id}/history": {"GET": history},
}
