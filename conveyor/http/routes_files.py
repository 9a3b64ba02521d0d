"""Routes of file inputs, exports and result bodies, signed links included."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping

import anyio
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from conveyor.aio.concurrency import unwrap
from conveyor.domain.errors import ConveyorError, ErrorCode, not_found
from conveyor.http import request as query
from conveyor.http.problems import MEDIA_TYPE
from conveyor.http.request import Handler, RequestContext, json_response, read_body, read_json_body
from conveyor.ports.exports import ExportFormat
from conveyor.service.links import ExportTarget, target_of
from conveyor.service.responses import encode
from conveyor.service.results import Content, Elsewhere
from conveyor.service.schemas import ProblemBody
from conveyor.service.service import Service


async def create(call: RequestContext) -> Response:
    """Create a slot; the answer holds the link for its file."""
    body = await read_json_body(call.request)
    return json_response(
        await call.service.inputs.create(call.caller_id, body.joined()), status=201
    )


INPUT_ROUTES: dict[str, dict[str, Handler]] = {
    "/v1/job_inputs": {"POST": create},
}


_FIELD_VALUE = re.compile(r"[\x20-\x7e]+")
_FALLBACK_TYPE = "application/octet-stream"


# The bytes come from strangers: a browser must give them no origin and no script, and must not
# guess their type.
STRANGERS_HEADERS = {"Content-Security-Policy": "sandbox", "X-Content-Type-Options": "nosniff"}


class BodyResponse(Response):
    """Streams scraped bytes unchanged, after the `first` that were read already."""

    def __init__(
        self, pieces: AsyncIterator[bytes], *, headers: Mapping[str, str], first: bytes = b""
    ) -> None:
        super().__init__(headers=headers)
        self._pieces = pieces
        self._first = first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream the body for as long as its client is there."""
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        try:
            with unwrap():
                async with anyio.create_task_group() as group:
                    # The server takes what it will send to nobody, and does not say so.
                    group.start_soon(_end_without_client, receive, group.cancel_scope)
                    if self._first:
                        await send(_piece_message(self._first))
                    async for piece in self._pieces:
                        await send(_piece_message(piece))
                    await send({"type": "http.response.body", "body": b""})
                    group.cancel_scope.cancel()
        finally:
            await _close(self._pieces)


def _piece_message(piece: bytes) -> Message:
    return {"type": "http.response.body", "body": piece, "more_body": True}


async def _end_without_client(receive: Receive, scope: anyio.CancelScope) -> None:
    """Cancel a scope once the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


async def read_link(request: Request, service: Service) -> Response:
    """Answer a signed link with the body of its task. Needs no key."""
    path = request.path_params
    target = target_of(path["job_id"], path["run_id"], path["task_id"])
    if target is None:
        raise not_found("result")
    redirects = query.word(request.query_params, "redirect", ("0", "1")) == "1"
    found = await service.results.linked_content(
        target,
        expires=query.text(request.query_params, "expires") or "",
        signature=query.text(request.query_params, "signature") or "",
        # A link to the store is good for GET alone.
        elsewhere=redirects and request.method == "GET",
    )
    if isinstance(found, Elsewhere):
        headers = {"Location": found.url, "Cache-Control": "no-store"}
        return Response(status_code=307, headers=headers)
    return await content_response(found, method=request.method)


async def content_response(found: Content | ProblemBody, *, method: str) -> Response:
    """Answer with the body of a task or its problem; to HEAD, only with the headers."""
    if isinstance(found, ProblemBody):
        return Response(encode(found), status_code=422, media_type=MEDIA_TYPE)
    content_type = found.content_type
    if not _FIELD_VALUE.fullmatch(content_type):
        content_type = _FALLBACK_TYPE
    headers = {**STRANGERS_HEADERS, "Content-Length": str(found.size), "Content-Type": content_type}
    return await stored_response(found.pieces, found.size, headers=headers, method=method)


async def stored_response(
    pieces: AsyncIterator[bytes], size: int, *, headers: Mapping[str, str], method: str
) -> Response:
    """Answer with so many stored bytes under these headers; to HEAD, only with the headers."""
    if method == "HEAD":
        await _close(pieces)
        return Response(headers=headers)
    first = await anext(pieces, b"")
    if len(first) < size:
        return BodyResponse(pieces, headers=headers, first=first)
    # Nothing is left to wait for, so nothing need watch whether the client is there.
    await _close(pieces)
    return Response(first, headers=headers)


async def _close(pieces: AsyncIterator[bytes]) -> None:
    aclose = getattr(pieces, "aclose", None)
    if aclose is not None:
        await aclose()


MEDIA_TYPES = {
    ExportFormat.ZIP: "application/zip",
    ExportFormat.JSONL: "application/x-ndjson",
    ExportFormat.CSV: "text/csv; charset=utf-8",
    ExportFormat.PARQUET: "application/vnd.apache.parquet",
}


async def start(call: RequestContext) -> Response:
    """Start an export of a run."""
    words = [one.value for one in ExportFormat]
    word = query.word(call.request.query_params, "format", words)
    body = await read_body(call.request)
    if body.joined().strip() not in (b"", b"{}"):
        raise ConveyorError(
            ErrorCode.INVALID_ARGUMENT, "an export takes no body: choose its format by ?format="
        )
    started = await call.service.exports.start(
        call.caller_id,
        call.job_id,
        call.named_run_id,
        export_format=ExportFormat(word or ExportFormat.ZIP),
    )
    return json_response(started, status=202)


async def get(call: RequestContext) -> Response:
    """Read an export."""
    export = await call.service.exports.get(
        call.caller_id, call.job_id, call.named_run_id, call.request.path_params["export_id"]
    )
    return json_response(export)


async def read_download(request: Request, service: Service) -> Response:
    """Answer a signed link with its export. Needs no key."""
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
    return await stored_response(found.pieces, found.size, headers=headers, method=request.method)


EXPORT_ROUTES: dict[str, dict[str, Handler]] = {
    "/v1/jobs/{job_id}/runs/{run_id}/exports": {"POST": start},
    "/v1/jobs/{job_id}/runs/{run_id}/exports/{export_id}": {"GET": get},
}
