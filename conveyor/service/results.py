"""Reads the results of a run page by page, their bodies and the histories of tasks.

A page ends with a cursor, from which the next one goes on. A cursor is opaque: a position by key,
never a row pointer, signed under the service's keys. Its scope (the list, its caller, the filter)
is signed with it but not carried, so a cursor of another list is refused like a forged one. The
cursor of a list in many shards holds one position for each shard and begins with `sh:`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import AsyncIterator, Sequence

import msgspec

from conveyor.domain import ids
from conveyor.domain.errors import ConveyorError, ErrorCode, not_found
from conveyor.domain.model import Job, Run, StoredBody, Task, TaskStatus
from conveyor.domain.shards import shards_of
from conveyor.ports.tasks import KeptTask
from conveyor.records.expiry import Expiry
from conveyor.records.sharded_reads import START, Read, ShardCursor, merge_page, task_reader
from conveyor.service.context import Context
from conveyor.service.failures import known_groups
from conveyor.service.links import LinkSigner, LinkTarget
from conveyor.service.responses import history_body, problem_body, result_body, wait_body
from conveyor.service.schemas import HistoryBody, ProblemBody, ResultsPage, present
from conveyor.service.schemas import ResultBody as ResultItem

_MAC_LENGTH = 12
_VERSION = b"1"
MAX_LENGTH = 1_024
"""Maximum characters of a cursor: 64 positions as far apart as possible need 760."""
COMPOSITE = "sh:"
"""The prefix of a cursor with one position for each shard."""
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def encode_cursor(position: str, *, scope: str, key: bytes) -> str:
    """Make the cursor that continues after `position` in the list named by `scope`."""
    payload = _VERSION + position.encode()
    token = _mac(payload, scope, key) + payload
    return base64.urlsafe_b64encode(token).rstrip(b"=").decode()


def decode_cursor(text: str, *, scope: str, key: bytes) -> str:
    """Return the position in a cursor. Raises ConveyorError(invalid_argument) for any other
    text."""
    try:
        if len(text) > MAX_LENGTH:
            raise ValueError("too long")
        token = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        if base64.urlsafe_b64encode(token).rstrip(b"=").decode() != text:
            raise ValueError("malformed")
        mac, payload = token[:_MAC_LENGTH], token[_MAC_LENGTH:]
        if not payload.startswith(_VERSION):
            raise ValueError("unknown version")
        if not hmac.compare_digest(mac, _mac(payload, scope, key)):
            raise ValueError("bad signature")
        return payload[len(_VERSION) :].decode()
    except (ValueError, binascii.Error, UnicodeError):
        raise ConveyorError(
            ErrorCode.INVALID_ARGUMENT, "cursor: not a cursor of this list"
        ) from None


def is_composite(text: str) -> bool:
    """Return whether a cursor claims to hold one position for each shard."""
    return text.startswith(COMPOSITE)


def encode_positions(run_id: str, positions: Sequence[int]) -> str:
    """Encode a run and one position for each shard, from -1, as a position for `encode_cursor`."""
    least = min(positions)
    words = [_base36(least + 1), *(_base36(position - least) for position in positions)]
    return ".".join([run_id, *words])


def decode_positions(text: str) -> tuple[str, tuple[int, ...]]:
    """Decode the result of `encode_positions`. Raises ValueError for any other text."""
    run_id, first, *rest = text.split(".")
    least = int(first, 36) - 1
    positions = tuple(least + int(word, 36) for word in rest)
    if not positions or encode_positions(run_id, positions) != text:
        raise ValueError("not the positions of shards")
    return run_id, positions


def _base36(number: int) -> str:
    digits = ""
    while number >= 36:
        number, digit = divmod(number, 36)
        digits = _DIGITS[digit] + digits
    return _DIGITS[number] + digits


def _mac(payload: bytes, scope: str, key: bytes) -> bytes:
    message = len(scope).to_bytes(4, "big") + scope.encode() + payload
    return hmac.new(key, message, hashlib.sha256).digest()[:_MAC_LENGTH]


class Cursors:
    """Encodes under the first key, decodes under any."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._keys = tuple(keys)

    def encode(self, position: str, *, scope: str) -> str:
        """Make the cursor that continues after `position` in the list named by `scope`."""
        return encode_cursor(position, scope=scope, key=self._keys[0])

    def decode(self, text: str, *, scope: str) -> str:
        """Return the position in a cursor. Raises ConveyorError(invalid_argument) for any other
        text."""
        for key in self._keys[:-1]:
            try:
                return decode_cursor(text, scope=scope, key=key)
            except ConveyorError:
                continue
        return decode_cursor(text, scope=scope, key=self._keys[-1])


class ResultsPosition(msgspec.Struct, frozen=True):
    """The position where a list of results continues: its run, and an index for each shard.

    The run is None if the position was given as a task id, which names no run.
    """

    run_id: str | None
    after: tuple[int, ...]
    composite: bool = False

    def in_shards(self, count: int) -> tuple[int, ...]:
        """Return the positions for a run of `count` shards.

        Raises ConveyorError(invalid_argument) if the cursor was made for another number of shards.
        """
        if self.composite != (count > 1) or len(self.after) != count:
            raise bad_cursor()
        return self.after


def encode_run_position(cursors: Cursors, run_id: str, after: Sequence[int], *, scope: str) -> str:
    """Make the cursor that continues a run after one index for each shard; composite if there are
    many."""
    if len(after) == 1:
        return cursors.encode(f"{run_id}.{after[0]}", scope=scope)
    position = encode_positions(run_id, after)
    return COMPOSITE + cursors.encode(position, scope=f"{COMPOSITE}{scope}")


def decode_run_position(cursors: Cursors, text: str, *, scope: str) -> ResultsPosition:
    """Return the position in a cursor, or of a plain task id.

    Raises ConveyorError(invalid_argument) for any other text.
    """
    if is_composite(text):
        return _composite(cursors, text, scope)
    try:
        position = cursors.decode(text, scope=scope)
    except ConveyorError:
        if ids.is_task_id(text):
            return ResultsPosition(None, (ids.task_index(text),))
        raise
    run_id, _, index = position.partition(".")
    if not index.isdecimal():
        raise bad_cursor()
    return ResultsPosition(run_id, (int(index),))


def _composite(cursors: Cursors, text: str, scope: str) -> ResultsPosition:
    position = cursors.decode(text.removeprefix(COMPOSITE), scope=f"{COMPOSITE}{scope}")
    try:
        run_id, after = decode_positions(position)
    except ValueError:
        raise bad_cursor() from None
    return ResultsPosition(run_id, after, composite=True)


def bad_cursor() -> ConveyorError:
    """Build the refusal of a cursor of another list."""
    return ConveyorError(ErrorCode.INVALID_ARGUMENT, "cursor: not a cursor of this list")


MAX_PAGE = 1_000
DEFAULT_PAGE = 100
LEAST_READ = 2_000
READ_PER_ROW = 4
"""A filtered page reads at most 2,000 rows of the store, or four for each row requested if that is
more; then the page is short or empty, and its cursor continues."""

FILTERS: dict[str, frozenset[TaskStatus] | None] = {
    "all": None,
    "successful": frozenset({TaskStatus.SUCCESSFUL}),
    "failed": frozenset({TaskStatus.FAILED}),
    "processing": frozenset({TaskStatus.PENDING, TaskStatus.PROCESSING}),
}
"""The values of the `status` filter, and the rows that each of them selects."""


DIRECT_FOR = 60
"""Seconds for which a link to the store itself is valid: it outlives a delete for as long."""


class Content(msgspec.Struct, frozen=True):
    """A body to send: its pieces, its size in bytes, and the type that the target gave."""

    pieces: AsyncIterator[bytes]
    size: int
    content_type: str


class Elsewhere(msgspec.Struct, frozen=True):
    """A link at which the store itself serves a body."""

    url: str


class Results:
    """Reads the results of a run's tasks.

    `rows_discarded` counts rows that were read for pages and are on none.
    """

    def __init__(
        self,
        context: Context,
        cursors: Cursors,
        links: LinkSigner,
        *,
        least_read: int = LEAST_READ,
    ) -> None:
        self._context = context
        self._least_read = least_read
        self._tasks = context.tasks
        self._cursors = cursors
        self._links = links
        self._expiry = Expiry(context.tasks)
        self.rows_discarded = 0

    async def page(
        self,
        caller_id: str,
        job_id: str,
        run_id: str | None,
        *,
        status: str,
        cursor: str | None,
        limit: int,
        groups: frozenset[str] | None = None,
    ) -> ResultsPage:
        """Return a page of a run, of the latest where `run_id` is None; `status` is a key of
        FILTERS. With `groups`, only failed tasks of these failure groups.

        A cursor names its run: pages of the latest run continue in the run that they began with.
        Raises ConveyorError: not_found; invalid_argument for a bad cursor; no_matching_tasks for a
        group that the run does not have.
        """
        scope = f"results:{job_id}:{status}"
        if groups is not None:
            scope += f":{','.join(sorted(groups))}"
        position = None
        if cursor is not None:
            position = decode_run_position(self._cursors, cursor, scope=scope)
            if run_id is not None and position.run_id not in (None, run_id):
                raise bad_cursor()
            run_id = position.run_id or run_id
        view, run = await self._context.live_run(caller_id, job_id, run_id)
        chosen = None
        if groups is not None:
            chosen = await known_groups(self._tasks, run.run_id, groups)
        read = task_reader(self._tasks, run.run_id, statuses=FILTERS[status], groups=chosen)
        most_read = None if FILTERS[status] is None else max(self._least_read, READ_PER_ROW * limit)
        page = await _gather(read, view.job, run, position, most_read=most_read, limit=limit)
        self.rows_discarded += page.discarded
        following = None
        if page.more:
            following = encode_run_position(self._cursors, run.run_id, page.positions, scope=scope)
        return ResultsPage(await self.rows(view.job, run, page.rows), present(following))

    async def content(
        self, caller_id: str, job_id: str, run_id: str | None, task_id: str
    ) -> Content | ProblemBody:
        """Return the body of a successful task, or the problem of a failed one.

        Raises ConveyorError: not_found; task_not_ready; result_expired.
        """
        found = await self._content(await self._kept(caller_id, job_id, run_id, task_id))
        return found if isinstance(found, ProblemBody) else await self._open(found)

    async def linked_content(
        self, target: LinkTarget, *, expires: str, signature: str, elsewhere: bool = False
    ) -> Content | ProblemBody | Elsewhere:
        """Return the body that a signed link opens; with `elsewhere`, a link of a minute to where
        the store serves it, if it does.

        Raises ConveyorError: permission_denied for a link that is not ours or has expired; else as
        `content` does.
        """
        now = self._context.clock.now()
        self._links.check(target, expires=expires, signature=signature, now=now)
        # The signature was given to the owner: it stands for them here.
        kept = await self._tasks.get_kept_task(target.job_id, target.run_id, target.task_id)
        if kept is None:
            # Find out why.
            job = await self._context.jobs.find_job(target.job_id)
            if job is None:
                raise not_found("job")
            kept = await self._kept(job.caller, target.job_id, target.run_id, target.task_id)
        found = await self._content(kept)
        if isinstance(found, ProblemBody):
            return found
        if elsewhere and (url := await self._direct_link(found, target.task_id)) is not None:
            return Elsewhere(url)
        return await self._open(found)

    async def history(
        self, caller_id: str, job_id: str, run_id: str | None, task_id: str
    ) -> HistoryBody:
        """Return the attempts and interruptions of a task, and what it waits for. Raises
        ConveyorError(not_found)."""
        _, run = await self._context.live_run(caller_id, job_id, run_id)
        task = await self._tasks.get_task(run.run_id, task_id)
        events = await self._tasks.task_history(run.run_id, task_id)
        if task is None or events is None:
            raise not_found("task")
        return history_body(events, wait_body(task, run, now=self._context.clock.now()))

    async def rows(self, job: Job, run: Run, tasks: Sequence[Task]) -> list[ResultItem]:
        """Show tasks of a run as rows of a list, with fresh links."""
        now = self._context.clock.now()
        link_end = now + round(self._context.options.result_url_ttl * 1_000)
        ends = await self._expiry.of(tasks, job.result_ttl_days, horizon=link_end)
        rows = []
        for task, end in zip(tasks, ends, strict=True):
            expired = end is not None and end <= now
            link = None
            if end is not None and not expired:
                target = LinkTarget(job.job_id, task.run_id, task.task_id)
                link = self._links.link(target, expires_at=min(link_end, end))
            waiting = wait_body(task, run, now=now)
            rows.append(result_body(task, expired=expired, result_url=link, waiting=waiting))
        return rows

    async def _kept(
        self, caller_id: str, job_id: str, run_id: str | None, task_id: str
    ) -> KeptTask:
        """Return a task of the caller. Raises ConveyorError(not_found)."""
        view, run = await self._context.live_run(caller_id, job_id, run_id)
        task = await self._tasks.get_task(run.run_id, task_id)
        if task is None:
            raise not_found("task")
        return KeptTask(task, view.job.result_ttl_days)

    async def _content(self, kept: KeptTask) -> StoredBody | ProblemBody:
        """Return where the body of a task is, or the problem of a failed one. Raises
        ConveyorError: task_not_ready; result_expired."""
        task = kept.task
        if task.error is not None and task.status is TaskStatus.FAILED:
            return problem_body(task.error)
        if task.result is None:
            raise ConveyorError(ErrorCode.TASK_NOT_READY, "the task has not ended yet")
        now = self._context.clock.now()
        [end] = await self._expiry.of([task], kept.result_ttl_days, horizon=now)
        if end is not None and end <= now:
            raise ConveyorError(ErrorCode.RESULT_EXPIRED, "the result is past its retention")
        return task.result

    async def _direct_link(self, result: StoredBody, task_id: str) -> str | None:
        return await self._context.blobs.download_link(
            result.blob_key,
            seconds=DIRECT_FOR,
            file_name=task_id,
            content_type=result.content_type,
        )

    async def _open(self, result: StoredBody) -> Content:
        pieces = await self._context.blobs.open(result.blob_key, size=result.size)
        if pieces is None:
            raise ConveyorError(
                ErrorCode.RESULT_EXPIRED,
                "the body of the result is missing, or lost some bytes, or is damaged",
            )
        return Content(pieces, result.size, result.content_type)


async def _gather(
    read: Read[Task],
    job: Job,
    run: Run,
    position: ResultsPosition | None,
    *,
    most_read: int | None,
    limit: int,
) -> ShardCursor[Task]:
    shards = shards_of(job)
    return await merge_page(
        read,
        shards,
        (START,) * shards.count if position is None else position.in_shards(shards.count),
        limit,
        end=run.ingest.next_index if run.ingest and run.ingesting else run.next_index,
        most_read=most_read,
    )
