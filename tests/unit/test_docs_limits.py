"""SPEC.md's numbers against the code's."""

from __future__ import annotations

import re

from conveyor.aio.outages import TRIAL_EVERY
from conveyor.domain import (
    delivery_places,
    failure_groups,
    fires,
    hosts,
    input_spec,
    params,
    result_shape,
    schedule,
    shards,
    strict_json,
    submission,
    text_rules,
    urls,
)
from conveyor.domain.api_keys import MAX_API_KEY_LENGTH
from conveyor.domain.deliveries import MOST_ATTEMPTS_KEPT, MOST_JUDGED
from conveyor.domain.remarks import MAX_LISTED, MAX_WARNINGS
from conveyor.domain.submission import MAX_BODY_BYTES, MAX_ROW_BYTES
from conveyor.domain.webhooks import MOST_WEBHOOK_URL
from conveyor.engine.planner import CONTROL_SLOTS
from conveyor.gateway import decode, direct, headers, problems, webhook
from conveyor.gateway.landmarks import HOSTS
from conveyor.handlers import delete, fire, packs
from conveyor.http import inbox, malformed, middleware
from conveyor.http.auth import LONGEST
from conveyor.http.pages.actions import MOST_FORM
from conveyor.http.pages.routes import MOST_PARAMETER
from conveyor.http.pages.session import SIGN_INS_A_SECOND, SIGN_INS_AT_ONCE
from conveyor.http.request import BODY_SPARE, MAX_LENGTH, SMALL_BODY
from conveyor.intake import frames, lines
from conveyor.intake.csv_file import MAX_RECORD
from conveyor.ports import queues
from conveyor.prod.aws.http import BODIES_OPEN, BODY_KEPT
from conveyor.prod.dynamodb.rerun import MOST_PINS
from conveyor.prod.dynamodb.runs import MOST_RUNS
from conveyor.prod.dynamodb.sweeping import PATIENCE
from conveyor.prod.dynamodb.task_rows import CONCURRENT_CALLS, STATEMENTS_PER_CALL
from conveyor.prod.redis import server
from conveyor.prod.s3 import blobs
from conveyor.prod.s3.blobs import PART
from conveyor.prod.sqs import messages
from conveyor.prod.sqs import queues as sqs_queues
from conveyor.prod.sqs.messages import LONGEST_HIDING
from conveyor.prod.startup_checks import BEAT, WATCH
from conveyor.records import expiry, task_sending
from conveyor.records.packed_bodies import RANGE_BYTES
from conveyor.records.quotas import COUNTED_PER_JOB, LEAST_COUNTED
from conveyor.roles.serving import MOST_FILES
from conveyor.service import hosts as hosts_service
from conveyor.service import progress, reruns, results, submit, task_lists
from conveyor.service.deliveries import MOST_DROPPED, MOST_READ, MOST_REPLAYED
from conveyor.service.jobs import DEFAULT_PAGE, MAX_PAGE
from conveyor.service.list_validation import CHILDREN
from conveyor.service.overview import MOST_IMAGE, MOST_LOOKED, MOST_PREVIEWED, ROWS_READ
from conveyor.service.sign_ins import LONGEST_SIGN_IN
from conveyor.service.webhooks import MOST_TESTS
from conveyor.settings import Settings
from conveyor.settings.validators import MOST_SHARDS
from conveyor.wire.connection import MOST_HELD_IN_ALL
from conveyor.wire.head import MAX_HEAD
from conveyor.wire.resolver import AT_A_TIME
from conveyor.wire.response import MAX_PADDING
from tests.unit.spec_document import differences, table

DEFAULTS = Settings()
JOB = submission.parse_job({"tasks": [{"url": "http://a.test/"}]}, submission.Limits())

LIMITS: dict[str, tuple[int, ...]] = {
    "request body": (DEFAULTS.max_request_bytes,),
    "memory for request bodies, of all callers and of one": (
        DEFAULTS.max_body_memory,
        DEFAULTS.max_caller_body_memory,
    ),
    "bytes of each request body that do not count": (BODY_SPARE,),
    "request after an early answer, read and dropped": (
        middleware.MAX_UNREAD,
        int(middleware.LINGER_SECONDS),
    ),
    "time without a byte of a request body (408 `request_timeout`)": (int(DEFAULTS.body_timeout),),
    "head of a request (one more socket read may pass)": (malformed.MAX_HEAD,),
    "time for the head of a request, and until the first one of a connection begins": (
        int(malformed.HEAD_SECONDS),
    ),
    "body of a preview or change of a schedule, and of a test of a receiver": (SMALL_BODY,),
    "times of day, and days, that a calendar names; interval of a rate": (
        schedule.MOST_ENTRIES,
        schedule.MOST_INTERVAL // schedule.UNITS["day"],
    ),
    "name of a zone beside a rate": (schedule.MOST_ZONE_NAME,),
    "URL of a receiver": (MOST_WEBHOOK_URL,),
    "time for the look-up of a receiver, to connect, and in all": (
        int(webhook.LOOKUP_SECONDS),
        int(webhook.CONNECT_SECONDS),
        int(webhook.WHOLE_SECONDS),
    ),
    "answer of a receiver, read and thrown away": (webhook.MOST_ANSWER,),
    "attempts at a time of a worker, to all slow hosts, to one host, and of one caller to it": (
        delivery_places.MOST_AT_A_TIME,
        delivery_places.MOST_SLOW,
        delivery_places.MOST_TO_A_HOST,
        delivery_places.MOST_OF_A_CALLER,
    ),
    "time of its last attempt that makes a host a slow one": (int(delivery_places.SLOW_AFTER),),
    "attempts at a time of one caller to hosts that are slow or new to the worker": (
        delivery_places.MOST_UNPROVEN,
    ),
    "failures in a row of a caller at a URL, then one attempt at a time until one succeeds": (
        delivery_places.FAILING_AFTER,
    ),
    "attempts of a delivery that are kept": (MOST_ATTEMPTS_KEPT,),
    "tests of receivers at a time in a process, one a caller": (MOST_TESTS,),
    "deliveries that one call replays": (MOST_REPLAYED,),
    "newest deliveries looked at to be dropped with their webhook or job": (MOST_DROPPED,),
    "deliveries read for a page of those in one status": (MOST_READ,),
    "newest deliveries that tell how a receiver does": (MOST_JUDGED,),
    "requests that the inbox of `conveyor-dev` keeps; their bodies, each and together": (
        inbox.MOST_REQUESTS,
        inbox.MOST_BODY,
        inbox.MOST_KEPT,
    ),
    "JSON nesting": (strict_json.MAX_DEPTH,),
    "objects and lists in a document, brackets in strings counted too": (
        strict_json.MAX_CONTAINERS,
    ),
    "digits of a whole number": (strict_json.MAX_DIGITS,),
    "inline tasks in a submit": (DEFAULTS.max_inline_tasks,),
    "tasks of a submit or rerun whose rows are written before the answer": (
        DEFAULTS.async_threshold,
    ),
    "rows of such a submit, held in memory": (task_lists.MOST_HELD,),
    "document that the server checks without a child": (submit.READ_HERE,),
    "lists checked at a time": (CHILDREN,),
    "estimated time of a check": (int(DEFAULTS.max_validation_seconds),),
    "bad tasks of a file, or left out, that are listed": (MAX_LISTED,),
    "unknown fields that an answer names": (MAX_WARNINGS,),
    "uploaded file, also unpacked": (DEFAULTS.max_input_bytes,),
    "tasks in an uploaded file": (DEFAULTS.max_input_rows,),
    "line of a file, record of CSV": (lines.MAX_LINE_BYTES, MAX_RECORD),
    "index of a CSV column, name of one": (input_spec.MAX_COLUMN, input_spec.MAX_COLUMN_NAME),
    "upload link": (int(DEFAULTS.input_upload_ttl) // 60,),
    "file input": (int(DEFAULTS.input_ttl) // 3_600,),
    "rows in a staged line, rows and bytes in a chunk": (
        frames.LINE_ROWS,
        frames.CHUNK_ROWS,
        frames.CHUNK_BYTES,
    ),
    "shards of a job": (1, MOST_SHARDS, 8, DEFAULTS.task_shard_count),
    "write units of a small job in one shard": (shards.MOST_UNITS_IN_ONE_SHARD,),
    "tasks in one add": (1, DEFAULTS.max_add_tasks),
    "tasks in an open job": (DEFAULTS.max_open_job_tasks,),
    "unfinished jobs of a caller": (),
    "scheduled jobs of a caller": (),
    "tasks of a caller a day": (),
    "newest jobs of a caller among which they are counted": (
        LEAST_COUNTED,
        COUNTED_PER_JOB,
    ),
    "requests of a caller a second": (),
    "requests of a caller at once, where they are limited": (DEFAULTS.rate_limit_burst,),
    "sign-in to pages": (LONGEST_SIGN_IN // 3_600,),
    "sign-ins of a process at once, and a second after that": (
        SIGN_INS_AT_ONCE,
        int(SIGN_INS_A_SECOND),
    ),
    "form of a page": (MOST_FORM,),
    "jobs that a bulk action looks through": (MOST_LOOKED,),
    "jobs that a page of a filtered list looks through": (MOST_LOOKED,),
    "body shown on a page; image shown on a page": (MOST_PREVIEWED, MOST_IMAGE),
    "parameter of a page": (MOST_PARAMETER,),
    "streams of progress of a process, of a caller in it": (
        DEFAULTS.max_streams,
        DEFAULTS.max_caller_streams,
    ),
    "runs in a stream of runs": (progress.LISTED,),
    "silence of a stream": (int(progress.BEAT),),
    "URL": (urls.MAX_LENGTH,),
    "POST body of a task": (MAX_BODY_BYTES,),
    "a task as stored": (MAX_ROW_BYTES,),
    "scraper params": (params.MAX_BYTES,),
    "custom headers": (params.MAX_HEADERS, params.MAX_HEADERS_BYTES),
    "metadata": (
        text_rules.MAX_METADATA_KEYS,
        text_rules.MAX_METADATA_KEY,
        text_rules.MAX_METADATA_VALUE,
    ),
    "external id": (128,),
    "job name": (submission.MAX_NAME,),
    "API key": (MAX_API_KEY_LENGTH,),
    "idempotency key": (MAX_LENGTH,),
    "cursor": (results.MAX_LENGTH,),
    "page of jobs or runs": (1, MAX_PAGE, DEFAULT_PAGE),
    "page of results": (1, results.MAX_PAGE, results.DEFAULT_PAGE),
    "failure groups of a run, and task ids that each shows": (
        failure_groups.MOST_GROUPS,
        failure_groups.MOST_SAMPLES,
    ),
    "characters of a detail by which failures differ": (failure_groups.LONGEST_DETAIL,),
    "types of bodies counted by name in a run, and characters of a name": (
        result_shape.MOST_TYPES,
        result_shape.LONGEST_TYPE,
    ),
    "rows of earlier runs read at a time, for the end of inherited results": (
        expiry.READS_AT_A_TIME,
    ),
    "rows read for a filtered page": (results.LEAST_READ, results.READ_PER_ROW),
    "decoded result body": (DEFAULTS.max_result_bytes,),
    "packed body, object of packed bodies, wait for others": (
        packs.PACKED_MOST,
        RANGE_BYTES,
        int(1_000 * packs.GATHERING),
    ),
    "bodies to be packed are kept while the store is away; after a stop": (
        int(packs.PATIENCE),
        int(packs.LAST_PATIENCE),
    ),
    "content codings of an answer": (problems.MAX_CODINGS,),
    "members of a gzip stream": (decode.MAX_MEMBERS,),
    "redirects of a direct fetch": (problems.MAX_REDIRECTS,),
    "hosts whose pauses a worker remembers": (direct.MOST_PAUSED_HOSTS,),
    "hosts of a run with a queue of their own; rows from which it has any": (
        queues.MOST_HOST_QUEUES,
        task_sending.LEAST_ROWS,
    ),
    "rows that are counted by host for an answer; for what holds a run back; for its page": (
        hosts_service.MOST_ROWS,
        hosts_service.MOST_ROWS_HELD,
        ROWS_READ,
    ),
    "patterns of hosts": (hosts.MOST_PATTERNS,),
    "head of an answer": (MAX_HEAD,),
    "bytes of an answer that are neither head nor body": (MAX_PADDING,),
    "received from all servers and not yet taken": (MOST_HELD_IN_ALL,),
    "hosts in a row that cannot be reached until the network counts as away": (HOSTS,),
    "trials of a worker during an outage": (int(1 / TRIAL_EVERY),),
    "look-ups of names at a time": (AT_A_TIME,),
    "open files of a process": (MOST_FILES[0],),
    "kept Content-Type": (headers.MAX_CONTENT_TYPE,),
    "gateway call": (int(DEFAULTS.gateway_timeout),),
    "wait of a rerun for calls in flight": (int(reruns.CLAIM_WAIT),),
    "partial rerun": (DEFAULTS.partial_rerun_window_days,),
    "result retention": (JOB.result_ttl_days,),
    "row retention": (DEFAULTS.row_retention_days,),
    "deliveries that are not pending, after their last change": (DEFAULTS.delivery_retention_days,),
    "fires, after their last change": (DEFAULTS.fire_retention_days,),
    "lateness of a missed fire that still runs": (int(DEFAULTS.schedule_catch_up) // 86_400,),
    "due schedules read at a time, decided about at a time in a worker": (
        fire.PAGE,
        fire.SIDE_BY_SIDE,
    ),
    "pause between looks at a fire that waits": (fires.LONGEST_PAUSE // 1_000,),
    "bodies in an export": (DEFAULTS.max_export_bytes,),
    "export": (int(DEFAULTS.export_ttl) // 3_600,),
    "stored idempotent answer": (int(DEFAULTS.idempotency_ttl) // 3_600,),
    "messages in a batch": (queues.MAX_BATCH,),
    "control messages in work, long deletions among them": (
        CONTROL_SLOTS,
        delete.MOST_LONG,
    ),
    "references of a run in memory, in development": (DEFAULTS.queue_window,),
    "file of key hashes": (LONGEST,),
    "tries of a call to AWS": (DEFAULTS.aws_attempts,),
    "calls at a time to a service of AWS": (DEFAULTS.aws_threads,),
    "bodies read from S3 at a time by a process; connection of one that nobody reads": (
        BODIES_OPEN,
        int(BODY_KEPT),
    ),
    "receives at a time from SQS, those that wait": (
        DEFAULTS.aws_receive_threads,
        sqs_queues.LONG_POLLS,
    ),
    "hiding of a message by SQS, after its receipt": (LONGEST_HIDING,),
    "delay of a message by SQS itself": (messages.MOST_DELAY,),
    "rows in an insertion, insertions at a time of one write": (
        STATEMENTS_PER_CALL,
        CONCURRENT_CALLS,
    ),
    "runs that one transaction deletes, pins that it writes": (
        MOST_RUNS,
        MOST_PINS,
    ),
    "part of a large body, parts in flight in a process": (
        PART,
        blobs.PARTS_AT_A_TIME,
    ),
    "an unfinished write until its leftovers are removed": (PATIENCE // 60_000,),
    "interval of a worker's heartbeat to the fleet item; silence before the terms may change": (
        int(BEAT),
        int(WATCH),
    ),
    "call of Redis": (int(server.TIMEOUT),),
}


def test_every_limit_is_the_one_in_force() -> None:
    told = {
        row[0]: tuple(int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", row[1]))
        for row in table("Limit", "Value", "Changed by")
    }

    assert not differences("SPEC.md, limits", told, LIMITS)
