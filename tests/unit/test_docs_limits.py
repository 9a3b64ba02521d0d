"""SPEC.md's numbers against the code's."""

from __future__ import annotations

import re

from conveyor.domain import (
    cursor,
    params,
    strict_json,
    submission,
    task_input,
    text_rules,
    urls,
)
from conveyor.gateway import decode, engine, headers, problems
from conveyor.http import idempotency, malformed
from conveyor.ports import queues
from conveyor.service import callers, listing, reruns, results
from conveyor.settings import Settings
from tests.unit.spec_document import table

DEFAULTS = Settings()
JOB = submission.parse_job({"tasks": [{"url": "http://a.test/"}]}, submission.Limits())

LIMITS: dict[str, tuple[int, ...]] = {
    "request body": (DEFAULTS.max_request_bytes,),
    "head of a request, and one read of the socket more": (malformed.MAX_HEAD,),
    "JSON nesting": (strict_json.MAX_DEPTH,),
    "objects and lists in a document, brackets in strings counted too": (
        strict_json.MAX_CONTAINERS,
    ),
    "digits of a whole number": (strict_json.MAX_DIGITS,),
    "inline tasks in a submit": (DEFAULTS.max_inline_tasks,),
    "tasks of a submit that is served synchronously": (DEFAULTS.async_threshold,),
    "tasks in one add": (1, DEFAULTS.max_add_tasks),
    "tasks in an open job": (DEFAULTS.max_open_job_tasks,),
    "unfinished jobs of a caller": (),
    "URL": (urls.MAX_LENGTH,),
    "POST body of a task": (task_input.MAX_BODY_BYTES,),
    "a task as stored": (task_input.MAX_ROW_BYTES,),
    "scraper params": (params.MAX_BYTES,),
    "custom headers": (params.MAX_HEADERS, params.MAX_HEADERS_BYTES),
    "metadata": (
        text_rules.MAX_METADATA_KEYS,
        text_rules.MAX_METADATA_KEY,
        text_rules.MAX_METADATA_VALUE,
    ),
    "external id": (128,),
    "job name": (submission.MAX_NAME,),
    "API key": (callers.MAX_API_KEY_LENGTH,),
    "idempotency key": (idempotency.MAX_LENGTH,),
    "cursor": (cursor.MAX_LENGTH,),
    "page of jobs or runs": (1, listing.MAX_PAGE, listing.DEFAULT_PAGE),
    "page of results": (1, results.MAX_PAGE, results.DEFAULT_PAGE),
    "decoded result body": (DEFAULTS.max_result_bytes,),
    "content codings of an answer": (problems.MAX_CODINGS,),
    "members of a gzip stream": (decode.MAX_MEMBERS,),
    "redirects of a direct fetch": (problems.MAX_REDIRECTS,),
    "header line, headers of an answer": (engine.MAX_HEADER_LINE, engine.MAX_HEADERS),
    "kept Content-Type": (headers.MAX_CONTENT_TYPE,),
    "gateway call": (int(DEFAULTS.gateway_timeout),),
    "wait of a rerun for calls in flight": (int(reruns.CLAIM_WAIT),),
    "partial rerun": (DEFAULTS.partial_rerun_window_days,),
    "result retention": (JOB.result_ttl_days,),
    "stored idempotent answer": (int(DEFAULTS.idempotency_ttl) // 3_600,),
    "messages in a batch": (queues.MAX_BATCH,),
    "references of a run in memory": (DEFAULTS.queue_window,),
}


def test_every_limit_is_the_one_in_force() -> None:
    told = {
        row[0]: tuple(int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", row[1]))
        for row in table("Limit", "Value", "Changed by")
    }

    assert told == LIMITS
