"""Show results to people: a table of rows, and failures grouped by their reason, with the option
that mends each."""

from __future__ import annotations

import textwrap
from collections.abc import Callable

from rich.cells import cell_len, set_cell_size

from conveyor.client.output import clean, count, duration, printable, shorten, size
from conveyor.client.progress import describe
from conveyor.client.wire import (
    FETCHED,
    FailureGroupReply,
    HostReply,
    JobReply,
    ProblemReply,
    ResultRow,
)
from conveyor.domain.hosts import LimitSource

SAMPLE_ROWS = 1_000
"""Rows that are read before the first line, to choose the columns."""
LEAST_URL = 40
MOST_NAME = 26
NARROW = 60
MOST_LONG_NAME = 16
MOST_STATE = 20
WIDE = 100
"""Columns from which a line of a job has room for the year and the seconds."""
_WHEN, _SHORT_WHEN = 19, 11
HOSTS_HEADER = f"{'waiting':>9}  {'claimed':>9}  {'done':>9}  {'failed':>9}  host, limits"
_GAP = "  "
_INDENT = " " * 11
_ENDED = FETCHED | {"failed"}


class ResultTable:
    """Writes rows as lines under a header; on a terminal of `width` columns no line is longer.

    A terminal has no room for task ids. A narrow one gets shorter times first, then no external
    ids, then status and URL alone.
    """

    def __init__(self, write: Callable[[str], None], width: int | None) -> None:
        self._write = write
        self._width = width
        self._sample: list[ResultRow] = []
        self._columns: list[_Column] | None = None

    def add(self, row: ResultRow) -> None:
        """Write a row, once enough are known to choose the columns."""
        if self._columns is not None:
            self._write(self._line(row))
            return
        self._sample.append(row)
        if len(self._sample) == SAMPLE_ROWS:
            self._begin()

    def end(self) -> bool:
        """Write what is left; return whether there was a row."""
        if self._columns is None and self._sample:
            self._begin()
        return self._columns is not None

    def _begin(self) -> None:
        self._columns = self._fitting()
        titles = [column.cell(column.title) for column in self._columns]
        self._write(self._cut(_GAP.join([*titles, "url, reason"])))
        for row in self._sample:
            self._write(self._line(row))

    def _fitting(self) -> list[_Column]:
        named = max(cell_len(_name(row)) for row in self._sample)
        by_id = any(row.external_id for row in self._sample)
        status = _Column("status", 10, lambda row: printable(row.status))
        size_ = _Column("size", 8, _size, right=True)
        name = _Column("id", min(max(named, 2), MOST_NAME), _name)
        full = [status, _Column("ended, UTC", 19, _ended), size_]
        if by_id or self._width is None:
            full.append(name)
        if self._width is None or self._room(full) >= LEAST_URL:
            return full
        if self._width < NARROW:
            return [status]
        short = [status, _Column("UTC", 8, lambda row: _ended(row)[11:]), size_]
        name = _Column("id", min(name.width, MOST_LONG_NAME), _name)
        return [*short, name] if by_id and self._room([*short, name]) >= LEAST_URL else short

    def _room(self, columns: list[_Column]) -> int:
        assert self._width is not None
        return self._width - sum(column.width + len(_GAP) for column in columns)

    def _line(self, row: ResultRow) -> str:
        assert self._columns is not None
        cells = [
            column.cell(column.text(row), cut=self._width is not None) for column in self._columns
        ]
        url, reason = printable(row.url), _reason(row)
        if self._width is not None:
            room = max(self._room(self._columns), 1)
            reason = _shortened(reason, room // 2)
            url = _shortened(url, room - (cell_len(reason) + len(_GAP) if reason else 0))
        return self._cut(_GAP.join([*cells, url, *([reason] if reason else [])]))

    def _cut(self, line: str) -> str:
        return line.rstrip() if self._width is None else _shortened(line.rstrip(), self._width)


class _Column:
    def __init__(
        self, title: str, width: int, text: Callable[[ResultRow], str], *, right: bool = False
    ) -> None:
        self.title = title
        self.width = width
        self.text = text
        self._right = right

    def cell(self, text: str, *, cut: bool = True) -> str:
        """Bring a text to the width of the column."""
        if cut:
            text = _shortened(text, self.width)
        pad = " " * (self.width - cell_len(text))
        return pad + text if self._right else text + pad


def jobs_header(width: int | None) -> str:
    """Return the line over those of `job_line`."""
    when = f"{'created, UTC':<{_WHEN}}" if _is_wide(width) else f"{'UTC':<{_SHORT_WHEN}}"
    return _cut_off(f"{'job':<26}  {when}  {'state':<10}  tasks, name", width)


def job_line(job: JobReply, width: int | None) -> str:
    """Write a job as a line; on a terminal of `width` columns no longer than that, with the numbers
    before the words about them."""
    run = job.latest_run
    when = printable(job.created_at)[:_WHEN].replace("T", " ")
    if not _is_wide(width):
        when = when[5 : 5 + _SHORT_WHEN]
    state = describe(run) if run else "scheduled" if job.schedule else printable(job.status)
    if width is not None:
        state = shorten(state, MOST_STATE)
    line = f"{clean(job.job_id)}  {when:<{_SHORT_WHEN}}  {state:<10}  "
    counts = f"{run.stats.completed:,}/{run.stats.total:,} done" if run else "no run"
    failed = f", {run.stats.failed:,} failed" if run and run.stats.failed else ""
    if width is not None and cell_len(line + counts + failed) > width:
        counts = counts.removesuffix(" done")
    name = shorten(printable(job.name or job.external_id or ""), 40)
    return _cut_off(f"{line}{counts}{failed}  {name}".rstrip(), width)


def _is_wide(width: int | None) -> bool:
    return width is None or width >= WIDE


def _cut_off(line: str, width: int | None) -> str:
    if width is None or cell_len(line) <= width:
        return line
    return set_cell_size(line, max(width - 1, 0)) + "…"


def host_line(host: HostReply) -> str:
    """Write what a run does to a host, with the limits there."""
    numbers = (host.pending, host.claimed, host.done, host.failed)
    by_limit, by_rate = _source(host, host.limit_set_by), _source(host, host.rate_set_by)
    if host.rate and by_limit == by_rate:
        by_limit = ""  # said once behind both
    limits = [
        f"{host.limit} at a time{by_limit}" if host.limit else "",
        f"{host.rate:g} a second{by_rate}" if host.rate else "",
        f"{host.ceiling} at a time since it refused" if host.ceiling else "",
        f"{host.interval:g} s apart (robots.txt)" if host.interval else "",
        f"closed until {_moment(host.closed_until)} UTC" if host.closed_until else "",
    ]
    cells = [f"{number:>9,}" for number in numbers]
    return _GAP.join([*cells, printable(", ".join(filter(None, [host.host, *limits])))])


def _source(host: HostReply, source: str | None) -> str:
    """Name who set a limit, in brackets, as far as the server says it."""
    if source is None:
        return ""
    return f" ({source} {host.pattern})" if source == LimitSource.PATTERN else f" ({source})"


def held_host_line(host: HostReply, *, is_whole: bool) -> str:
    """Say how a host holds a run back, and who set that. How many tasks wait for it is known if the
    run was counted as a whole."""
    waits = f"{count(host.pending, 'task')} {'waits' if host.pending == 1 else 'wait'}"
    if host.claimed:
        waits += f", {host.claimed:,} claimed"
    line = f"{host.host}: {waits}; {host.detail or 'it is at a limit'}"
    apart = max(1 / host.rate if host.rate else 0.0, host.interval or 0.0)
    if apart and is_whole:
        line += f"; so these take {duration(host.pending * apart)} at least"
    return printable(line)


def waiting_line(row: ResultRow) -> str:
    """Say of a task that waits why, and until when."""
    return f"such as {printable(row.url)}: {_reason(row)}"


def _name(row: ResultRow) -> str:
    return printable(row.external_id or row.task_id)


def _size(row: ResultRow) -> str:
    return "" if row.size is None else size(row.size)


def _ended(row: ResultRow) -> str:
    return _moment(row.updated_at) if row.status in _ENDED else ""


def _reason(row: ResultRow) -> str:
    """Say why a task failed, or why it is left alone and until when."""
    if row.waiting is not None:
        return f"{printable(row.waiting.reason)}, waits until {_moment(row.waiting.until)} UTC"
    return printable(row.error.code) if row.error else ""


def _wrapped(line: str, width: int) -> str:
    # A URL is left whole, to be copied; the terminal breaks it if it must.
    return textwrap.fill(
        line,
        max(width, len(_GAP) + 1),
        subsequent_indent=_GAP,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _shortened(text: str, width: int) -> str:
    """Cut a text to `width` columns in its middle: the ends of URLs tell them apart."""
    if cell_len(text) <= width:
        return text
    head = max(width - 1, 0) // 2
    tail = max(width - 1, 0) - head
    return set_cell_size(text, head) + "…"[:width] + set_cell_size(text[::-1], tail)[::-1]


SHOWN_REASONS = 10

_FIXES = {
    "api_key_cap_reached": "raise the cap of the API key",
    "auth_failed": "check the API key, and that its plan has the features asked for",
    "blocked": "a scraping gateway may be let in (--gateway URL of the server)",
    "connection_failed": "check host and port: nothing took the connection",
    "gateway_unreachable": "check CONVEYOR_GATEWAY of the server, and whether it is up",
    "host_not_found": "check the spelling of the host, and the resolver of the server",
    "impossible_host": "check the spelling of the host",
    "rate_limited": "make fewer calls at a time with --max-inflight N",
    "result_too_large": "raise CONVEYOR_MAX_RESULT_BYTES of the server",
    "tls_failed": "check the certificate of the host, and whether its port speaks TLS",
    "timeout": "raise CONVEYOR_GATEWAY_TIMEOUT of the server",
    "unauthenticated": "check the API key",
}
_PRIVATE = "address_refused"
_KEPT_STATUSES = frozenset({"blocked", "bad_target", "gateway_error"})


class FailureSummary:
    """Counts failed tasks by reason, and remembers the first URL of each reason.

    `own_server` means that the server is part of the command, and takes its options.
    """

    def __init__(self, *, own_server: bool) -> None:
        self._own_server = own_server
        self._groups: dict[tuple[str, str], _Group] = {}
        self.tasks = 0

    def add(self, row: ResultRow) -> None:
        """Count a failed task."""
        error = row.error or ProblemReply(code="no_reason", title="no reason given")
        self.tasks += 1
        group = self._groups.setdefault((error.code, error.title), _Group(row.url, error))
        group.tasks += 1

    def lines(self, width: int | None = None) -> list[str]:
        """Return a line for each reason, the most frequent first; on a terminal of `width` columns
        longer ones are wrapped between words."""
        groups = self._by_frequency()
        lines = [self._line(group) for group in groups[:SHOWN_REASONS]]
        if rest := groups[SHOWN_REASONS:]:
            tasks = sum(group.tasks for group in rest)
            reasons = count(len(rest), "other reason")
            lines.append(f"failed: {count(tasks, 'task')} for {reasons}")
        return lines if width is None else [_wrapped(line, width) for line in lines]

    def documents(self) -> list[dict[str, str | int | None]]:
        """Return the same for programs: an object for each reason, the most frequent first."""
        return [
            {
                "code": group.error.code,
                "reason": group.error.detail or group.error.title,
                "tasks": group.tasks,
                "first_url": group.url,
                "fix": fix_of(group.error, own_server=self._own_server),
            }
            for group in self._by_frequency()
        ]

    def _by_frequency(self) -> list[_Group]:
        return sorted(self._groups.values(), key=lambda group: -group.tasks)

    def _line(self, group: _Group) -> str:
        url, error = printable(group.url), group.error
        reason = printable(f"{error.detail or error.title} ({error.code})")
        if group.tasks == 1:
            line = f"failed: {url}: {reason}"
        else:
            line = f"failed: {group.tasks:,} tasks: {reason}, first {url}"
        fix = fix_of(error, own_server=self._own_server)
        return f"{line}; {fix}" if fix else line


def fix_of(error: ProblemReply, *, own_server: bool) -> str | None:
    """Say what mends a failure, as far as that is known; `own_server` as in FailureSummary."""
    if error.code == _PRIVATE:
        if own_server:
            return "--allow-private fetches private addresses too"
        return "start the server with --allow-private to fetch private addresses too"
    if error.code in _KEPT_STATUSES and 300 <= error.status <= 599:
        keep = f"--param allowed_status_codes={error.status} keeps such pages"
        other = _FIXES.get(error.code)
        return f"{keep}; {other}" if other else keep
    return _FIXES.get(error.code)


class _Group:
    def __init__(self, url: str, error: ProblemReply) -> None:
        self.url = url
        self.error = error
        self.tasks = 0


def cause_line(group: FailureGroupReply, example: ResultRow | None) -> str:
    """Say how many tasks failed for a reason, with the URL of one of them, and what mends that."""
    tasks = count(group.count, "task")
    if group.reason is None:
        return f"{tasks} failed for other reasons"
    error = ProblemReply(code=group.code or group.reason, status=group.status or 0)
    words = dict.fromkeys(filter(None, (group.reason, group.code, str(group.status or ""))))
    title = example.error.title if example is not None and example.error is not None else ""
    line = f"{tasks} failed: {group.detail or title or group.reason} ({', '.join(words)})"
    if example is not None:
        line += f", such as {example.url}"
    fix = fix_of(error, own_server=False)
    return printable(f"{line}; {fix}" if fix else line)


FAILURES_HEADER = f"{'tasks':>9}  {'group':<12}  reason, code, status; first and last, UTC"


def failure_group_lines(group: FailureGroupReply, width: int | None) -> list[str]:
    """Show a failure group as lines of a table under FAILURES_HEADER; on a terminal of `width`
    columns the detail is cut."""
    words = [group.reason, group.code, None if group.status is None else str(group.status)]
    kind = ", ".join(printable(word) for word in words if word) or "of too many kinds to tell apart"
    first, last = (_moment(text) for text in (group.first_at, group.last_at))
    when = f"; {first}" + (f" to {last}" if last != first else "") if first else ""
    lines = [f"{group.count:>9,}  {printable(group.group):<12}  {kind}{when}"]
    if group.detail:
        room = None if width is None else max(width - len(_INDENT), 1)
        detail = printable(group.detail)
        lines.append(_INDENT + (detail if room is None else _shortened(detail, room)))
    return lines


def _moment(text: str | None) -> str:
    return printable(text or "")[:19].replace("T", " ")
