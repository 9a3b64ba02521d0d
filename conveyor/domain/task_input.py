"""One task as a caller sends it, checked and brought into its stored form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from conveyor.domain import params, text_rules, urls
from conveyor.domain.errors import InvalidTask, InvalidTaskReason
from conveyor.domain.model import TaskBody, TaskSpec
from conveyor.domain.text_rules import Refused

MAX_BODY_BYTES = 16_384
MAX_ROW_BYTES = 131_072


def parse(raw: object, index: int, job_params: Mapping[str, str]) -> TaskSpec | InvalidTask:
    """The task at `index` of a list, or the first reason why it is refused.

    Fields that are not known are ignored, and null is the same as absent, so that newer clients can
    send tasks to older servers. `job_params` are the job's params, normalized.
    """
    try:
        return _spec(raw, job_params)
    except Refused as refused:
        return InvalidTask(index, refused.reason, refused.value)


def _spec(raw: object, job_params: Mapping[str, str]) -> TaskSpec:
    if not isinstance(raw, dict):
        raise Refused(InvalidTaskReason.INVALID_ARGUMENT, text_rules.shown(raw))
    url = _url(raw)
    if len(raw) == 1:
        return TaskSpec(url)
    external_id = raw.get("external_id")
    if external_id is not None and not text_rules.is_external_id(external_id):
        raise Refused(InvalidTaskReason.INVALID_EXTERNAL_ID, text_rules.shown(external_id))
    own_params = params.normalize(raw.get("zenrows_params")) or None
    if own_params is not None:
        params.check_combination(params.merge(job_params, own_params))
    method = _method(raw.get("method"))
    spec = TaskSpec(
        url,
        external_id,
        text_rules.metadata(raw.get("metadata")),
        method,
        _body(raw.get("body"), method),
        own_params,
    )
    if method == "POST":
        _refuse_post_conflict(params.merge(job_params, own_params))
    _refuse_large(spec)
    return spec


def _url(raw: dict[str, Any]) -> str:
    url = raw.get("url")
    if not isinstance(url, str):
        given = text_rules.shown(url) if "url" in raw else None
        raise Refused(InvalidTaskReason.MALFORMED_URL, given)
    reason = urls.check(url)
    if reason is not None:
        raise Refused(reason, text_rules.shown(url))
    return url


def _method(raw: object) -> str:
    if raw is None:
        return "GET"
    method = raw.upper() if isinstance(raw, str) else ""
    if method not in ("GET", "POST"):
        raise Refused(InvalidTaskReason.UNSUPPORTED_METHOD, text_rules.shown(raw))
    return method


def _body(raw: object, method: str) -> TaskBody | None:
    """The body to send. A refusal never repeats it."""
    if raw is None:
        return None
    if method != "POST":
        raise Refused(InvalidTaskReason.BODY_NOT_ALLOWED, method)
    try:
        if isinstance(raw, str):
            body = TaskBody(raw, "application/x-www-form-urlencoded")
        else:
            content = json.dumps(raw, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
            body = TaskBody(content, "application/json")
        size = len(body.content.encode())
    except (ValueError, TypeError, RecursionError):
        raise Refused(InvalidTaskReason.BODY_MALFORMED) from None
    if size > MAX_BODY_BYTES:
        raise Refused(InvalidTaskReason.BODY_TOO_LARGE, f"{size} bytes")
    return body


def _refuse_post_conflict(merged: Mapping[str, str]) -> None:
    key = params.conflict_with_post(merged)
    if key is not None:
        raise Refused(InvalidTaskReason.METHOD_PARAM_CONFLICT, key)


def _refuse_large(spec: TaskSpec) -> None:
    if spec.metadata is None and spec.body is None and spec.params is None:
        return
    size = len(msgspec.json.encode(spec))
    if size > MAX_ROW_BYTES:
        raise Refused(InvalidTaskReason.INVALID_ARGUMENT, f"a task of {size} bytes")
