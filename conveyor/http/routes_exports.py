"""Routes of exports, and the download that a signed link opens."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.http import query
from conveyor.http.blobs import STRANGERS_HEADERS, stored_response
from conveyor.http.body import read_body
from conveyor.http.call import Call, Handler, json_response
from conveyor.ports.exports import ExportFormat
from conveyor.service.export_links import ExportTarget
from conveyor.service.service import Service

MEDIA_TYPES = {
    ExportFormat.ZIP: "application/zip",
    ExportFormat.JSONL: "application/x-ndjson",
    ExportFormat.CSV: "text/csv; charset=utf-8",
    ExportFormat.PARQUET: "application/vnd.apache.parquet",
}


async def start(call: Call) -> Response:
    """Ask for an export of a run."""
    words = [one.value for one in ExportFormat]
    word = query.word(call.request.query_params, "format", words)
    body = await read_body(call.request)
    if body.joined().strip() not in (b"", b"{}"):
        raise ConveyorError(
            ErrorCode.INVALID_ARGUMENT, "an export takes no body: its format goes into ?format="
        )
    started = await call.service.exports.start(
        call.caller_id,
        call.job_id,
        call.named_run_id,
        export_format=ExportFormat(word or ExportFormat.ZIP),
    )
    return json_response(started, status=202)


async def get(call: Call) -> Response:
    """How far an export is."""
    export = await call.service.exports.get(
        call.caller_id, call.job_id, call.named_run_id, call.request.path_params["export_id"]
    )
    return json_response(export)


async def read_download(request: Request, service: Service) -> Response:
    """The export that a signed link opens. Needs no key."""
    target = ExportTarget(**request.path_params)
    params = request.query_params
    found = await service.exports.download(
        target,
        expires=query.text(params, "expires") or "",
        signature=query.text(params, "signature") or "",
    )
    headers = {
        **STRANGERS_HEADERS,
        "Content-Disposition": f'attachment; filename="{found.filename}"',
        "Content-Length": str(found.size),
        "Content-Type": MEDIA_TYPES[found.format],
    }
    return await stored_response(found.pieces, headers=headers, method=request.method)


ROUTES: dict[str, dict[str, Handler]] = {
    "/v1/jobs/{job_id}/runs/{run_id}/exports": {"POST": start},
    "/v1/jobs/{job_id}/runs/{run_id}/exports/{export_id}": {"GET": get},
}
