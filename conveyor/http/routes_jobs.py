"""Routes of jobs and their tasks, of runs and their results."""

from __future__ import annotations

from starlette.responses import Response

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import JobStatus
from conveyor.http.request import (
    ConnectionGuard,
    Handler,
    RequestContext,
    cursor,
    given_response,
    json_response,
    keyed_request,
    page_size,
    read_body,
    read_json_body,
    text,
    word,
)
from conveyor.http.routes_files import content_response
from conveyor.service import results
from conveyor.service.failures import parse_groups
from conveyor.service.jobs import DEFAULT_PAGE, JOB_TYPES, MAX_PAGE
from conveyor.service.reruns import parse_choice


async def list_runs(call: RequestContext) -> Response:
    """List a page of a job's runs."""
    params = call.request.query_params
    page = await call.service.listing.list_runs(
        call.caller_id,
        call.job_id,
        cursor=cursor(params),
        limit=page_size(params, default=DEFAULT_PAGE, most=MAX_PAGE),
    )
    return json_response(page)


async def get_run(call: RequestContext) -> Response:
    """Read a run."""
    run = await call.service.listing.get_run(call.caller_id, call.job_id, call.named_run_id)
    return json_response(run)


async def delete_run(call: RequestContext) -> Response:
    """Delete a run with its results."""
    await call.service.lifecycle.delete_run(call.caller_id, call.job_id, call.named_run_id)
    return Response(status_code=202)


async def list_results(call: RequestContext) -> Response:
    """List a page of results."""
    params = call.request.query_params
    status = word(params, "status", results.FILTERS) or "all"
    page = await call.service.results.page(
        call.caller_id,
        call.job_id,
        call.run_id,
        status=status,
        groups=parse_groups(text(params, "group"), results.FILTERS[status]),
        cursor=cursor(params),
        limit=page_size(params, default=results.DEFAULT_PAGE, most=results.MAX_PAGE),
    )
    return json_response(page)


async def list_failures(call: RequestContext) -> Response:
    """List the failure groups of a run."""
    found = await call.service.failures.of_run(call.caller_id, call.job_id, call.run_id)
    return json_response(found)


async def list_hosts(call: RequestContext) -> Response:
    """List the busiest hosts of a run, or those that hold it back."""
    held = word(call.request.query_params, "held", ("0", "1")) == "1"
    hosts = call.service.hosts
    read = hosts.held_of_run if held else hosts.of_run
    found = await read(call.caller_id, call.job_id, call.named_run_id)
    return json_response(found)


async def content(call: RequestContext) -> Response:
    """Answer with the body of a task."""
    found = await call.service.results.content(
        call.caller_id, call.job_id, call.run_id, call.task_id
    )
    return await content_response(found, method=call.request.method)


async def history(call: RequestContext) -> Response:
    """List the attempts at a task."""
    events = await call.service.results.history(
        call.caller_id, call.job_id, call.run_id, call.task_id
    )
    return json_response(events)


RUN_ROUTES: dict[str, dict[str, Handler]] = {
    "/v1/jobs/{job_id}/runs": {"GET": list_runs},
    "/v1/jobs/{job_id}/runs/{run_id}": {"GET": get_run, "DELETE": delete_run},
    "/v1/jobs/{job_id}/results": {"GET": list_results},
    "/v1/jobs/{job_id}/runs/{run_id}/results": {"GET": list_results},
    "/v1/jobs/{job_id}/runs/{run_id}/failures": {"GET": list_failures},
    "/v1/jobs/{job_id}/runs/{run_id}/hosts": {"GET": list_hosts},
    "/v1/jobs/{job_id}/tasks/{task_id}/content": {"GET": content},
    "/v1/jobs/{job_id}/runs/{run_id}/tasks/{task_id}/content": {"GET": content},
    "/v1/jobs/{job_id}/tasks/{task_id}/history": {"GET": history},
    "/v1/jobs/{job_id}/runs/{run_id}/tasks/{task_id}/history": {"GET": history},
}


async def submit(call: RequestContext) -> Response:
    """Create a job."""
    body = await read_json_body(call.request)
    keyed = keyed_request(call.request, call.caller_id, body)
    return given_response(
        await call.service.submissions.submit(
            call.caller, body.pieces, keyed=keyed, attended=ConnectionGuard(call.request)
        )
    )


async def list_jobs(call: RequestContext) -> Response:
    """List a page of the caller's jobs."""
    params = call.request.query_params
    status = word(params, "status", [status.value for status in JobStatus])
    page = await call.service.listing.list_jobs(
        call.caller_id,
        status=JobStatus(status) if status is not None else None,
        job_type=word(params, "type", JOB_TYPES),
        cursor=cursor(params),
        limit=page_size(params, default=DEFAULT_PAGE, most=MAX_PAGE),
    )
    return json_response(page)


async def get_job(call: RequestContext) -> Response:
    """Read a job."""
    return json_response(await call.service.listing.get_job(call.caller_id, call.job_id))


async def delete_job(call: RequestContext) -> Response:
    """Delete a job with its runs and results."""
    await call.service.lifecycle.delete_job(call.caller_id, call.job_id)
    return Response(status_code=202)


async def add_tasks(call: RequestContext) -> Response:
    """Add tasks to an open job."""
    job_id = call.job_id
    body = await read_json_body(call.request)
    keyed = keyed_request(call.request, call.caller_id, body)
    return given_response(
        await call.service.additions.add_tasks(call.caller_id, job_id, body.joined(), keyed=keyed)
    )


async def close(call: RequestContext) -> Response:
    """Close an open job."""
    return json_response(await call.service.lifecycle.close(call.caller_id, call.job_id))


async def stop(call: RequestContext) -> Response:
    """Stop the latest run."""
    return json_response(await call.service.lifecycle.stop(call.caller_id, call.job_id))


async def pause(call: RequestContext) -> Response:
    """Pause the latest run."""
    return json_response(
        await call.service.lifecycle.pause(call.caller_id, call.job_id, paused=True)
    )


async def resume(call: RequestContext) -> Response:
    """Resume the latest run."""
    return json_response(
        await call.service.lifecycle.pause(call.caller_id, call.job_id, paused=False)
    )


async def rerun(call: RequestContext) -> Response:
    """Start a new run from the latest one."""
    job_id = call.job_id
    params = call.request.query_params
    choice = parse_choice(text(params, "status"), text(params, "group"))
    body = await read_body(call.request)
    if body.joined().strip() not in (b"", b"{}"):
        raise ConveyorError(
            ErrorCode.INVALID_ARGUMENT, "a rerun takes no body: choose tasks by ?status="
        )
    keyed = keyed_request(call.request, call.caller_id, body)
    return given_response(
        await call.service.reruns.rerun(call.caller, job_id, choice=choice, keyed=keyed)
    )


JOB_ROUTES: dict[str, dict[str, Handler]] = {
    "/v1/jobs": {"GET": list_jobs, "POST": submit},
    "/v1/jobs/{job_id}": {"GET": get_job, "DELETE": delete_job},
    "/v1/jobs/{job_id}/tasks": {"POST": add_tasks},
    "/v1/jobs/{job_id}/close": {"POST": close},
    "/v1/jobs/{job_id}/stop": {"POST": stop},
    "/v1/jobs/{job_id}/cancel": {"POST": stop},
    "/v1/jobs/{job_id}/pause": {"POST": pause},
    "/v1/jobs/{job_id}/resume": {"POST": resume},
    "/v1/jobs/{job_id}/rerun": {"POST": rerun},
}
