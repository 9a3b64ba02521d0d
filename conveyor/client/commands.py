"""The commands of the client, from an open connection to an exit code.

`JobSession` runs one job from its tasks to its files, on a server that exists for it alone.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from conveyor.client.api import Api, ClientClock, connect
from conveyor.client.download import download, prepare
from conveyor.client.errors import ClientError, ServerRefused
from conveyor.client.inputs import OpenInput, SourcedTask
from conveyor.client.output import (
    clean,
    clean_json,
    command,
    count,
    mask_credentials,
    printable,
    shorten,
)
from conveyor.client.program import FAILED, INCOMPLETE, SUCCEEDED
from conveyor.client.progress import describe, meter_for, view_for
from conveyor.client.submit import JobOptions, submit, submit_file
from conveyor.client.watch import failure_line, follow, latest_run, summary
from conveyor.client.wire import JobReply, ResultRow, RunReply, SubmitReply
from conveyor.domain.errors import ErrorCode

SHOWN_FAILURES = 5
JOBS_HEADER = f"{'job':<26}  {'created, UTC':<19}  {'state':<10}  tasks, name"


class ServerTarget(msgspec.Struct, frozen=True):
    """The server of a command, the API key and the clock.

    `named` is the server as given on the command line, None if it was not given. A server with
    `lasts` unset ends with the command, so no other command can use it.
    """

    server: str
    api_key: str
    pace: ClientClock
    named: str | None = None
    lasts: bool = True

    def __repr__(self) -> str:
        return f"Target({printable(self.server)})"

    def command(self, *words: str, out: Path | str | None = None) -> str:
        """Build a command for the same server, to show to the user."""
        return command(*words, server=self.named, out=out)


class Following(msgspec.Struct, frozen=True):
    """The download at the end of a run: the directory for bodies, and the status of the tasks to
    download.

    `words` is the command that does the same later.
    """

    words: tuple[str, ...]
    out: Path | None = None
    status: str | None = None


class Terminal:
    """Prints output, and holds the line to print if the user interrupts."""

    def __init__(self) -> None:
        self.farewell = "interrupted"

    def say(self, line: str) -> None:
        """Print a line of the output."""
        print(line, flush=True)

    def warn(self, line: str) -> None:
        """Print a line that is not part of the output."""
        print(line, file=sys.stderr, flush=True)


async def submit_tasks(
    target: ServerTarget,
    terminal: Terminal,
    tasks: Sequence[SourcedTask] | OpenInput,
    options: JobOptions,
    *,
    idempotency_key: str | None = None,
    watch: bool = False,
    out: Path | None = None,
) -> int:
    """Create a job from tasks or from a file of tasks.

    With `watch` or `out`, follow it to its end; with `out`, download its results too.
    """
    _prepare(out)
    async with connect(target.server, target.api_key, target.pace) as api:
        reply = await make_job(api, terminal, tasks, options, idempotency_key=idempotency_key)
        if not watch and out is None:
            return SUCCEEDED
        return await follow_to_end(
            api, target, terminal, reply.latest_run, _watching(reply.job_id, out)
        )


async def make_job(
    api: Api,
    terminal: Terminal,
    tasks: Sequence[SourcedTask] | OpenInput,
    options: JobOptions,
    *,
    idempotency_key: str | None = None,
) -> SubmitReply:
    """Create a job and print its id."""
    terminal.farewell = "interrupted before the job was whole"
    if isinstance(tasks, OpenInput):
        with meter_for(sys.stderr, api.pace) as meter:
            reply = await submit_file(api, tasks, options, meter, idempotency_key=idempotency_key)
    else:
        whole = len(tasks)

        def sent(number: int) -> None:
            if number < whole:
                terminal.warn(f"{number:,} of {whole:,} tasks sent")

        reply = await submit(api, tasks, options, idempotency_key=idempotency_key, on_sent=sent)
    terminal.say(f"job {clean(reply.job_id)}: {count(reply.accepted_tasks, 'task')} accepted")
    return reply


async def watch_job(target: ServerTarget, terminal: Terminal, job_id: str, out: Path | None) -> int:
    """Follow the latest run of a job to its end."""
    _prepare(out)
    async with connect(target.server, target.api_key, target.pace) as api:
        with about(job_id):
            run = await latest_run(api, job_id)
        return await follow_to_end(api, target, terminal, run, _watching(job_id, out))


async def rerun_job(
    target: ServerTarget,
    terminal: Terminal,
    job_id: str,
    *,
    status: str | None,
    watch: bool,
    out: Path | None,
) -> int:
    """Run a job again: all tasks, or those in `status`."""
    _prepare(out)
    async with connect(target.server, target.api_key, target.pace) as api:
        key = target.pace.token(16).hex()
        with about(job_id):
            reply = await api.rerun(job_id, status=status, idempotency_key=key)
        kept = f", {reply.inherited_tasks:,} kept" if reply.inherited_tasks else ""
        again = count(reply.retried_tasks, "task")
        terminal.say(f"job {clean(reply.job_id)}: {again} to run again{kept}")
        if not watch and out is None:
            return SUCCEEDED
        return await follow_to_end(api, target, terminal, reply.latest_run, _watching(job_id, out))


def _prepare(out: Path | None) -> None:
    # Check now rather than at the end of a run that may take hours.
    if out is not None:
        prepare(out)


@contextmanager
def about(job_id: str) -> Iterator[None]:
    """Name the job in every refusal."""
    shown = printable(job_id) or "''"
    if not job_id.strip("."):
        # In a path it would name something else.
        raise ClientError(f"no such job: {shown}")
    try:
        yield
    except ServerRefused as refusal:
        if refusal.code == ErrorCode.NOT_FOUND:
            raise ClientError(f"no such job: {shown}") from None
        raise ClientError(f"job {shown}: {refusal}") from None


def _watching(job_id: str, out: Path | None) -> Following:
    return Following(words=("watch", job_id), out=out)


async def follow_to_end(
    api: Api, target: ServerTarget, terminal: Terminal, run: RunReply, end: Following
) -> int:
    """Watch a run until it ends, print its summary, download if asked; return the exit code."""
    back = target.command(*end.words, out=end.out)
    terminal.farewell = f"interrupted; the job goes on. Come back with: {back}"
    started = api.pace.monotonic()
    was_live = run.live
    run = await follow(api, run, view_for(sys.stdout, target.named))
    seconds = api.pace.monotonic() - started if was_live else None
    terminal.say(summary(run, seconds))
    await _warn_of_failures(api, target, terminal, run)
    if end.out is None:
        return _exit_code(run)
    return await _bring(api, target, terminal, run, end)


def _exit_code(run: RunReply, status: str | None = None) -> int:
    whole = run.completed if status == "successful" else run.succeeded
    return SUCCEEDED if whole else INCOMPLETE


async def _warn_of_failures(
    api: Api, target: ServerTarget, terminal: Terminal, run: RunReply
) -> None:
    if run.stats.failed == 0:
        return
    shown = 0
    async for row, _raw in api.results(run.job_id, run_id=run.run_id, status="failed"):
        if shown == SHOWN_FAILURES:
            break
        terminal.warn(failure_line(row))
        shown += 1
    if run.stats.failed > shown and not target.lasts:
        terminal.warn(f"and {run.stats.failed - shown:,} more")
    elif run.stats.failed > shown:
        listing = target.command("results", run.job_id, "--status", "failed")
        terminal.warn(f"all of them: {listing}")


async def _bring(
    api: Api, target: ServerTarget, terminal: Terminal, run: RunReply, end: Following
) -> int:
    """Download into the directory and print the result; return the exit code."""
    assert end.out is not None
    words = ("results", *end.words[1:])
    again = target.command(*words, out=end.out)
    terminal.farewell = f"interrupted. For the results: {again}"
    done = await download(api, run.job_id, end.out, run_id=run.run_id, status=end.status)
    for problem in done.problems:
        terminal.warn(f"not downloaded: {problem}")
    terminal.say(f"{count(done.files, 'file')} in {clean(str(end.out))}")
    return FAILED if done.problems else _exit_code(run, end.status)


async def show_results(
    target: ServerTarget, terminal: Terminal, job_id: str, *, jsonl: bool, status: str | None
) -> int:
    """List the rows of the latest run as they are now."""
    all_succeeded = True
    async with connect(target.server, target.api_key, target.pace) as api:
        with about(job_id):
            async for row, raw in api.results(job_id, status=status):
                all_succeeded = all_succeeded and row.succeeded
                print(_json_line(raw) if jsonl else _row_line(row))
    return SUCCEEDED if all_succeeded else INCOMPLETE


async def fetch_results(
    target: ServerTarget, terminal: Terminal, job_id: str, *, out: Path, status: str | None
) -> int:
    """Download the bodies of the latest run into a directory, once the run has ended."""
    _prepare(out)
    only = () if status is None else ("--status", status)
    end = Following(words=("results", job_id, *only), out=out, status=status)
    async with connect(target.server, target.api_key, target.pace) as api:
        with about(job_id):
            run = await latest_run(api, job_id)
        if run.live:
            return await follow_to_end(api, target, terminal, run, end)
        return await _bring(api, target, terminal, run, end)


def _json_line(raw: bytes) -> str:
    compact = msgspec.json.format(raw, indent=-1)
    return clean_json(mask_credentials(compact.decode()))


def _row_line(row: ResultRow) -> str:
    name = printable(row.external_id or row.task_id)
    line = f"{printable(row.status):<10}  {name:<26}  {printable(row.url)}"
    if row.waiting:
        until = printable(row.waiting.until)[:19].replace("T", " ")
        line = f"{line}  {printable(row.waiting.reason)}, waits until {until} UTC"
    return f"{line}  {printable(row.error.code)}" if row.error else line


async def list_jobs(
    target: ServerTarget, terminal: Terminal, *, limit: int, status: str | None, jsonl: bool
) -> int:
    """List jobs, newest first."""
    async with connect(target.server, target.api_key, target.pace) as api:
        shown = 0
        async for job in _jobs(api, limit, status):
            if not shown and not jsonl:
                print(JOBS_HEADER)
            print(clean_json(msgspec.json.encode(job).decode()) if jsonl else _job_line(job))
            shown += 1
    if not shown and not jsonl:
        terminal.warn("no jobs yet: conveyor submit URL")
    return SUCCEEDED


async def _jobs(api: Api, limit: int, status: str | None) -> AsyncIterator[JobReply]:
    cursor = None
    while limit > 0:
        page = await api.jobs(limit=min(limit, 100), status=status, cursor=cursor)
        for job in page.jobs[:limit]:
            yield job
        limit -= len(page.jobs)
        cursor = page.next_cursor
        if not cursor:
            return


def _job_line(job: JobReply) -> str:
    run = job.latest_run
    counts = f"{run.stats.completed:,}/{run.stats.total:,} done" if run else "no run"
    failed = f", {run.stats.failed:,} failed" if run and run.stats.failed else ""
    state = describe(run) if run else printable(job.status)
    name = shorten(printable(job.name or job.external_id or ""), 40)
    when = printable(job.created_at)[:19].replace("T", " ")
    return f"{clean(job.job_id)}  {when}  {state:<10}  {counts}{failed}  {name}".rstrip()


async def change_runs(
    target: ServerTarget, terminal: Terminal, job_ids: Sequence[str], verb: str
) -> int:
    """Stop, pause or resume the latest run of each job, in order, until the server refuses one."""
    async with connect(target.server, target.api_key, target.pace) as api:
        for job_id in job_ids:
            with about(job_id):
                run = await api.change_run(job_id, verb)
            done = f"{run.stats.completed:,}/{run.stats.total:,} done"
            terminal.say(f"job {printable(job_id)}: {describe(run)}, {done}")
    return SUCCEEDED


async def remove_jobs(target: ServerTarget, terminal: Terminal, job_ids: Sequence[str]) -> int:
    """Delete jobs with all their runs and results."""
    async with connect(target.server, target.api_key, target.pace) as api:
        for job_id in job_ids:
            with about(job_id):
                await api.delete_job(job_id)
            terminal.say(f"job {printable(job_id)}: deleted")
    return SUCCEEDED


class JobSession:
    """A job: its tasks, its options, and the directory `out` for its results.

    After an interrupt and `salvage`, `farewell` is the line to print.
    """

    def __init__(
        self,
        target: ServerTarget,
        terminal: Terminal,
        tasks: Sequence[SourcedTask] | OpenInput,
        options: JobOptions,
        *,
        out: Path,
    ) -> None:
        self.farewell = "interrupted before anything was done"
        self._target = target
        self._terminal = terminal
        self._tasks = tasks
        self._options = options
        self._out = out
        self._run: RunReply | None = None

    async def drain(self, server: str) -> int:
        """Submit, follow the run to its end, and download its results; return the exit code."""
        async with connect(server, self._target.api_key, self._target.pace) as api:
            reply = await make_job(api, self._terminal, self._tasks, self._options)
            self._run = reply.latest_run
            end = Following(words=(), out=self._out)
            return await follow_to_end(api, self._target, self._terminal, self._run, end)

    async def salvage(self, server: str) -> None:
        """Stop the run and download the results so far."""
        if self._run is None:
            return
        self.farewell = f"interrupted; only a part of the results is in {clean(str(self._out))}"
        self._terminal.warn(
            "stopping and saving the results so far; interrupt again to quit at once"
        )
        async with connect(server, self._target.api_key, self._target.pace) as api:
            run = await self._stopped(api, self._run)
            self._terminal.say(summary(run))
            done = await download(api, run.job_id, self._out, run_id=run.run_id)
        for problem in done.problems:
            self._terminal.warn(f"not downloaded: {problem}")
        self._terminal.say(f"{count(done.files, 'file')} in {clean(str(self._out))}")
        self.farewell = "interrupted; the results so far are kept"

    async def _stopped(self, api: Api, run: RunReply) -> RunReply:
        try:
            return await api.change_run(run.job_id, "stop")
        except ServerRefused:
            # The run had already ended.
            return await api.run(run.job_id, run.run_id)
