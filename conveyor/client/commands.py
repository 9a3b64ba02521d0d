"""The commands of the client, from an open connection to an exit code.

`JobSession` runs one job from its tasks to its files, on a server that exists for it alone.
"""

from __future__ import annotations

import shutil
import sys
import webbrowser
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, contextmanager
from enum import Enum
from typing import TextIO

import msgspec

from conveyor.client.api import Api, ClientClock, connect
from conveyor.client.directory import Destination
from conveyor.client.download import Downloads, download
from conveyor.client.errors import ClientError, ServerRefused
from conveyor.client.inputs import OpenInput, SourcedTask, hints_about
from conveyor.client.jobs import find_job, find_jobs, is_id, newest_jobs
from conveyor.client.listing import (
    FAILURES_HEADER,
    HOSTS_HEADER,
    FailureSummary,
    ResultTable,
    failure_group_lines,
    host_line,
    job_line,
    jobs_header,
)
from conveyor.client.output import (
    clean,
    clean_json,
    command,
    count,
    mask_credentials,
    printable,
    to_the_second,
)
from conveyor.client.program import FAILED, INCOMPLETE, SUCCEEDED
from conveyor.client.progress import describe, meter_for, view_for
from conveyor.client.submit import (
    JobOptions,
    line_of,
    record_line,
    sifted,
    skipped_lines,
    submit,
    submit_file,
    warning_lines,
)
from conveyor.client.watch import (
    follow,
    latest_run,
    named_run,
    reason_of_outage,
    run_of,
    summary,
)
from conveyor.client.wire import JobReply, RunReply, SubmitReply
from conveyor.domain.errors import ErrorCode
from conveyor.domain.export_rows import MANIFEST
from conveyor.domain.model import JobStatus, TaskStatus

FIRST_CALL = 0.5
"""Seconds that a person waits, so that the first call of a new job can show that all is away."""
GROUPED_FAILURES = 10_000
"""Failed tasks that are read for their reasons at the end of a run."""


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

    def connect(self, terminal: Terminal) -> AbstractAsyncContextManager[Api]:
        """Open a client of the server; the terminal tells if the server lets it wait."""
        return connect(self.server, self.api_key, self.pace, on_slow=terminal.warn)

    def command(self, *words: str, out: Destination | None = None) -> str:
        """Build a command for the same server, to show to the user."""
        if out is None:
            return command(*words, server=self.named)
        forced = ("--force",) if out.force else ()
        return command(*words, *forced, server=self.named, out=out.path)


class Printing(Enum):
    """Content of standard output: lines for people, JSON alone, or the id of the new job alone.

    Without lines for people there, these go to standard error.
    """

    TEXT = "text"
    JSON = "json"
    ID = "id"


class Following(msgspec.Struct, frozen=True):
    """The download at the end of a run: the directory for bodies, and the status of the tasks to
    download.

    `words` is the command that does the same later.
    """

    words: tuple[str, ...]
    out: Destination | None = None
    status: str | None = None


class Terminal:
    """Prints output, and holds the line to print if the user interrupts."""

    def __init__(self, printing: Printing = Printing.TEXT) -> None:
        self.farewell = "interrupted"
        self.printing = printing
        self.people = sys.stdout if printing is Printing.TEXT else sys.stderr

    def say(self, line: str) -> None:
        """Print a line of the output for people."""
        print(line, file=self.people, flush=True)

    def give(self, document: object) -> None:
        """Print a document for programs, if they are given JSON."""
        if self.printing is Printing.JSON:
            print(_json_line(msgspec.json.encode(document)), flush=True)

    @property
    def gives_json(self) -> bool:
        """True if documents are printed in place of lines for people."""
        return self.printing is Printing.JSON

    def give_id(self, job_id: str) -> None:
        """Print the id of a new job, if it is given alone."""
        if self.printing is Printing.ID:
            print(clean(job_id), flush=True)

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
    out: Destination | None = None,
) -> int:
    """Create a job from tasks or from a file of tasks.

    With `watch` or `out`, follow it to its end; with `out`, download its results too.
    """
    if out is not None:
        # With a key the job may be the one whose results are there.
        out.prepare() if idempotency_key is None else out.try_out()
    async with target.connect(terminal) as api:
        reply = await make_job(api, terminal, tasks, options, idempotency_key=idempotency_key)
        if not watch and out is None:
            if options.schedule:
                await _tell_first_fire(api, target, terminal, reply.job_id)
            await _warn_of_outage(api, target, terminal, reply)
            return SUCCEEDED
        return await follow_to_end(
            api, target, terminal, run_of(reply, server=target.named), _watching(reply.job_id, out)
        )


async def _tell_first_fire(api: Api, target: ServerTarget, terminal: Terminal, job_id: str) -> None:
    try:
        job = await api.job(job_id)
    except ClientError:
        # The job is there, whatever became of this look.
        return
    if job.next_scheduled_run is not None:
        fires = target.command("schedule", "show", job_id)
        at = to_the_second(job.next_scheduled_run)
        terminal.say(f"it fires first at {at} UTC; all its fires: {fires}")


async def _warn_of_outage(
    api: Api, target: ServerTarget, terminal: Terminal, reply: SubmitReply
) -> None:
    """Say that the run of a new job waits for something that is away; nobody will watch it."""
    run = reply.latest_run
    if run is None or not run.live:
        return
    if sys.stderr.isatty():
        # A gateway that nobody asked yet is asked meanwhile.
        await api.pace.sleep(FIRST_CALL)
    try:
        run = await api.run(run.job_id, run.run_id)
    except ClientError:
        # The job is there, whatever became of this look.
        return
    why = reason_of_outage(run)
    if why and not run.paused:
        back = target.command("watch", run.job_id)
        terminal.warn(f"warning: {why}; the job waits for it: {back}")


async def make_job(
    api: Api,
    terminal: Terminal,
    tasks: Sequence[SourcedTask] | OpenInput,
    options: JobOptions,
    *,
    idempotency_key: str | None = None,
) -> SubmitReply:
    """Create a job; print its id, what was left out, and what was ignored."""
    terminal.farewell = "interrupted before the job was whole"
    hints: list[str] = []
    if isinstance(tasks, OpenInput):
        with meter_for(sys.stderr, api.pace) as meter:
            reply = await submit_file(api, tasks, options, meter, idempotency_key=idempotency_key)
        lines = [record_line(tasks.name, bad) for bad in reply.invalid_tasks]
        skipped = reply.skipped_tasks
    else:
        tasks, lines = sifted(tasks, options)
        skipped, whole, hints = len(lines), len(tasks), hints_about(tasks)

        def sent(number: int) -> None:
            if number < whole:
                terminal.warn(f"{number:,} of {whole:,} tasks sent")

        reply = await submit(api, tasks, options, idempotency_key=idempotency_key, on_sent=sent)
        lines += [line_of(bad, tasks) for bad in reply.invalid_tasks]
        skipped += reply.skipped_tasks
    for line in (*skipped_lines(lines, skipped), *warning_lines([*hints, *reply.warnings])):
        terminal.warn(line)
    left_out = f", {skipped:,} skipped" if skipped else ""
    accepted = count(reply.accepted_tasks, "task")
    each = " for each run" if options.schedule else ""
    terminal.say(f"job {clean(reply.job_id)}: {accepted} accepted{each}{left_out}")
    terminal.give(reply)
    terminal.give_id(reply.job_id)
    return reply


async def open_pages(target: ServerTarget, terminal: Terminal, text: str | None) -> int:
    """Open the dashboard in a browser, at a job if one is named; where there is no browser, the
    printed address is all."""
    address = f"{target.server.rstrip('/').removesuffix('/v1')}/dashboard"
    if text is not None:
        async with target.connect(terminal) as api:
            job_id = await find_job(api, text)
        if not is_id(job_id):
            raise ClientError(f"no job id: {printable(text)}")
        address += f"/jobs/{job_id}"
    terminal.say(printable(address))
    try:
        opened = webbrowser.open(address)
    except webbrowser.Error:
        opened = False
    terminal.give({"address": address, "opened": opened})
    return SUCCEEDED


async def watch_job(
    target: ServerTarget, terminal: Terminal, job_id: str, out: Destination | None
) -> int:
    """Follow the latest run of a job to its end."""
    if out is not None:
        out.try_out()
    async with target.connect(terminal) as api:
        job_id = await find_job(api, job_id)
        with about(job_id):
            run = await latest_run(api, job_id, server=target.named)
        return await follow_to_end(api, target, terminal, run, _watching(job_id, out))


async def rerun_job(
    target: ServerTarget,
    terminal: Terminal,
    job_id: str,
    *,
    statuses: Sequence[TaskStatus],
    group: str | None = None,
    watch: bool,
    out: Destination | None,
) -> int:
    """Run a job again: all tasks, or those in one of the states, or of the failure groups in a
    comma list."""
    if out is not None:
        out.try_out()
    async with target.connect(terminal) as api:
        job_id = await find_job(api, job_id)
        if out is not None:
            out.prepare(job_id)
        key = target.pace.token(16).hex()
        with about(job_id):
            job = await api.job(job_id)
            # A scheduled job that has not fired yet runs for the first time.
            before = (
                None if job.schedule and not job.latest_run else run_of(job, server=target.named)
            )
            status = ",".join(statuses) or None
            first = f"for its first one: {target.command('rerun', job_id)}"
            groups = None if group is None else target.command("failures", job_id)
            try:
                async with _needing_run(api, job_id, first):
                    reply = await api.rerun(job_id, status=status, group=group, idempotency_key=key)
            except ServerRefused as refusal:
                raise _hinted(refusal, before, groups) from None
        kept = f", {reply.inherited_tasks:,} kept" if reply.inherited_tasks else ""
        again = count(reply.retried_tasks, "task")
        terminal.say(f"job {clean(reply.job_id)}: {again} to run again{kept}")
        terminal.give(reply)
        ran = 0 if before is None else before.stats.total
        left_out = ran - reply.retried_tasks - reply.inherited_tasks
        if before is not None and left_out > 0:
            export = target.command("export", job_id, "--run", before.run_id)
            terminal.warn(
                f"{count(left_out, 'task')} without a result left out (--unfinished takes them"
                f" along); the run before still lists them: {export} -o tasks.csv"
            )
        if not watch and out is None:
            return SUCCEEDED
        return await follow_to_end(api, target, terminal, reply.latest_run, _watching(job_id, out))


def _hinted(refusal: ServerRefused, before: RunReply | None, groups: str | None) -> ServerRefused:
    """Add to a refusal the command that names failure groups, if one was asked for, or the option
    that finds tasks, if there are some without a result."""
    unfinished = 0 if before is None else before.stats.total - before.stats.completed
    hint = ""
    if groups is not None:
        hint = f"its groups: {groups}"
    elif unfinished:
        hint = f"{count(unfinished, 'task')} without a result: --unfinished runs them"
    if refusal.code != ErrorCode.NO_MATCHING_TASKS or not hint:
        return refusal
    return ServerRefused(f"{refusal}; {hint}", code=refusal.code, status=refusal.status)


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
        raise ServerRefused(
            f"job {shown}: {refusal}", code=refusal.code, status=refusal.status
        ) from None


@asynccontextmanager
async def _needing_run(api: Api, job_id: str, hint: str) -> AsyncIterator[None]:
    """Tell a scheduled job that has no run yet, with a hint, from one that is not there."""
    try:
        yield
    except ServerRefused as refusal:
        if refusal.code not in (ErrorCode.NOT_FOUND, ErrorCode.NO_PRIOR_RUN):
            raise
        job = await api.job(job_id)
        if job.schedule is None or job.latest_run is not None:
            raise
        raise ClientError(f"job {printable(job_id)} has no run yet; {hint}") from None


def _watching(job_id: str, out: Destination | None) -> Following:
    return Following(words=("watch", job_id), out=out)


async def follow_to_end(
    api: Api, target: ServerTarget, terminal: Terminal, run: RunReply, end: Following
) -> int:
    """Watch a run until it ends, print its summary, download if asked; return the exit code."""
    if end.out is not None:
        # Now rather than at the end of a run that may take hours.
        end.out.prepare(run.job_id)
    back = target.command(*end.words, out=end.out)
    terminal.farewell = f"interrupted; the job goes on. Come back with: {back}"
    started = api.pace.monotonic()
    was_live = run.live
    run = await follow(api, run, view_for(terminal.people, target.named))
    seconds = api.pace.monotonic() - started if was_live else None
    terminal.say(summary(run, seconds))
    groups = await _failures(api, target, run)
    terminal.give({**msgspec.to_builtins(run), "failures": groups.documents()})
    _warn_of_failures(target, terminal, run, groups, end.out)
    if end.out is None:
        return _exit_code(run)
    return await _bring(api, target, terminal, run, end)


def _exit_code(run: RunReply, status: str | None = None) -> int:
    whole = run.completed if status == "successful" else run.succeeded
    return SUCCEEDED if whole else INCOMPLETE


async def _failures(api: Api, target: ServerTarget, run: RunReply) -> FailureSummary:
    """Read the reasons of the failed tasks of a run."""
    groups = FailureSummary(own_server=not target.lasts)
    if run.stats.failed:
        async for row, _raw in api.results(run.job_id, run_id=run.run_id, status="failed"):
            groups.add(row)
            if groups.tasks == GROUPED_FAILURES:
                break
    return groups


def _warn_of_failures(
    target: ServerTarget,
    terminal: Terminal,
    run: RunReply,
    groups: FailureSummary,
    out: Destination | None,
) -> None:
    lines = groups.lines(_width(sys.stderr))
    for line in lines:
        terminal.warn(line)
    if rest := run.stats.failed - groups.tasks:
        terminal.warn(f"failed: {rest:,} more")
    if run.stats.failed > len(lines):
        listing = target.command("results", run.job_id, "--status", "failed")
        if out is not None:
            listing = clean(str(out.path / MANIFEST))
        terminal.warn(f"all of them: {listing}")


async def _bring(
    api: Api, target: ServerTarget, terminal: Terminal, run: RunReply, end: Following
) -> int:
    """Download into the directory and print the result; return the exit code."""
    assert end.out is not None
    words = ("results", *end.words[1:])
    again = target.command(*words, out=end.out)
    terminal.farewell = f"interrupted. For the results: {again}"
    with meter_for(sys.stderr, api.pace) as meter:
        done = await download(api, run, end.out, meter, status=end.status)
    _tell_of_files(terminal, done, end.out)
    return FAILED if done.problems else _exit_code(run, end.status)


def _tell_of_files(terminal: Terminal, done: Downloads, out: Destination) -> None:
    for note in [*done.notes, *(f"not downloaded: {problem}" for problem in done.problems)]:
        terminal.warn(note)
    terminal.say(f"{count(done.files, 'file')} in {clean(str(out.path))}")
    terminal.give(
        {
            "directory": str(out.path),
            "files": done.files,
            "not_downloaded": done.problems,
            "notes": done.notes,
        }
    )


async def _chosen_run(
    api: Api, target: ServerTarget, job_id: str, run_id: str | None
) -> tuple[RunReply, RunReply]:
    """Return the latest run of a job, and the named one, which is the latest by default."""
    latest = await latest_run(api, job_id, server=target.named)
    if run_id and run_id != latest.run_id:
        return latest, await named_run(api, job_id, run_id, server=target.named)
    return latest, latest


async def show_hosts(
    target: ServerTarget, terminal: Terminal, job_id: str, *, run_id: str | None
) -> int:
    """List what a run (the latest by default) does to each host, the busiest first."""
    async with target.connect(terminal) as api:
        job_id = await find_job(api, job_id)
        with about(job_id):
            _, run = await _chosen_run(api, target, job_id, run_id)
            found = await api.hosts(job_id, run.run_id)
    terminal.give(found)
    if found.hosts:
        terminal.say(HOSTS_HEADER)
    for host in found.hosts:
        terminal.say(host_line(host))
    if found.more_hosts:
        terminal.say(f"and {count(found.more_hosts, 'more host')}")
    if found.counted_tasks < found.tasks:
        terminal.warn(
            f"counted among {found.counted_tasks:,} of {count(found.tasks, 'task')}, from all over "
            "the run"
        )
    return SUCCEEDED


async def show_failures(
    target: ServerTarget, terminal: Terminal, job_id: str, *, run_id: str | None
) -> int:
    """List the failed tasks of a run (the latest by default) by kind, each kind with the command
    that runs it again."""
    async with target.connect(terminal) as api:
        job_id = await find_job(api, job_id)
        with about(job_id):
            latest, run = await _chosen_run(api, target, job_id, run_id)
            found = await api.failures(job_id, run.run_id)
    terminal.give(found)
    if found.groups:
        terminal.say(FAILURES_HEADER)
    for group in found.groups:
        for line in failure_group_lines(group, _width(terminal.people)):
            terminal.say(line)
        if run.run_id == latest.run_id:
            again = target.command("rerun", job_id, "--group", group.group)
            terminal.say(f"{'':11}{again}")
    terminal.say(f"{count(found.failed, 'task')} failed")
    if found.failed and run.run_id != latest.run_id:
        terminal.warn("a newer run is there: only tasks of the latest one run again")
    elif found.failed and run.live:
        terminal.warn("the run is live: its tasks run again once it has ended")
    return INCOMPLETE if found.failed else SUCCEEDED


async def show_results(
    target: ServerTarget,
    terminal: Terminal,
    job_id: str,
    *,
    jsonl: bool,
    status: str | None,
    group: str | None = None,
) -> int:
    """List the rows of the latest run as they are now; with `group`, those of failure groups."""
    all_succeeded = True
    table = ResultTable(print, _width(sys.stdout))
    groups = FailureSummary(own_server=not target.lasts)
    async with target.connect(terminal) as api:
        job_id = await find_job(api, job_id)
        fires = f"when it fires: {target.command('schedule', 'show', job_id)}"
        with about(job_id):
            try:
                async with _needing_run(api, job_id, fires):
                    async for row, raw in api.results(job_id, status=status, group=group):
                        all_succeeded = all_succeeded and row.succeeded
                        if row.status == "failed":
                            groups.add(row)
                        if jsonl:
                            print(_json_line(raw))
                        else:
                            table.add(row)
            except ServerRefused as refusal:
                raise _hinted(refusal, None, target.command("failures", job_id)) from None
    if not jsonl and not table.end():
        terminal.warn("no such tasks")
    for line in groups.lines(_width(sys.stderr)):
        terminal.warn(line)
    return SUCCEEDED if all_succeeded else INCOMPLETE


async def fetch_results(
    target: ServerTarget, terminal: Terminal, job_id: str, *, out: Destination, status: str | None
) -> int:
    """Download the bodies of the latest run into a directory, once the run has ended."""
    out.try_out()
    only = () if status is None else ("--status", status)
    async with target.connect(terminal) as api:
        job_id = await find_job(api, job_id)
        end = Following(words=("results", job_id, *only), out=out, status=status)
        with about(job_id):
            run = await latest_run(api, job_id, server=target.named)
        if run.live:
            return await follow_to_end(api, target, terminal, run, end)
        return await _bring(api, target, terminal, run, end)


def _width(stream: TextIO) -> int | None:
    """Return the columns of a terminal, None for anything else."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def _json_line(raw: bytes) -> str:
    compact = msgspec.json.format(raw, indent=-1)
    return clean_json(mask_credentials(compact.decode()))


async def list_jobs(
    target: ServerTarget, terminal: Terminal, *, limit: int, status: str | None, jsonl: bool
) -> int:
    """List jobs, newest first."""
    width = _width(sys.stdout)
    async with (
        target.connect(terminal) as api,
        aclosing(newest_jobs(api, limit, status=status)) as jobs,
    ):
        shown = 0
        async for job in jobs:
            if not shown and not jsonl:
                print(jobs_header(width))
            line = clean_json(msgspec.json.encode(job).decode()) if jsonl else job_line(job, width)
            print(line)
            shown += 1
    if not shown and not jsonl:
        terminal.warn("no jobs yet: conveyor submit URL")
    return SUCCEEDED


async def change_runs(
    target: ServerTarget, terminal: Terminal, jobs: Sequence[str], verb: str
) -> int:
    """Stop, pause or resume the latest run of each job, in order, until the server refuses one."""
    async with target.connect(terminal) as api:
        for job_id in await find_jobs(api, jobs):
            word = "resume" if verb == "resume" else "pause"
            fires = f"its fires: {target.command('schedule', word, job_id)}"
            with about(job_id):
                async with _needing_run(api, job_id, f"to {word} {fires}"):
                    run = await api.change_run(job_id, verb)
            done = f"{run.stats.completed:,}/{run.stats.total:,} done"
            terminal.say(f"job {printable(job_id)}: {describe(run)}, {done}")
            terminal.give(run)
    return SUCCEEDED


async def read_jobs(
    target: ServerTarget, terminal: Terminal, jobs: Sequence[str]
) -> list[JobReply]:
    """Read the jobs that the texts name. Raises ClientError if there is none of that name."""
    async with target.connect(terminal) as api:
        return [await existing_job(api, job_id) for job_id in await find_jobs(api, jobs)]


async def existing_job(api: Api, job_id: str) -> JobReply:
    """Read a job. Raises ClientError if there is none, or it is deleted."""
    with about(job_id):
        job = await api.job(job_id)
    if job.status == JobStatus.DELETED:
        # The server shows it until everything of it is removed.
        raise ClientError(f"no such job: {printable(job_id)}")
    return job


def removal(jobs: Sequence[JobReply]) -> str:
    """Name the jobs to delete, one a line."""
    width = _width(sys.stderr)
    return "\n".join(["Delete with all results:", *(job_line(job, width) for job in jobs)])


async def remove_jobs(target: ServerTarget, terminal: Terminal, jobs: Sequence[str]) -> int:
    """Delete jobs with all their runs and results, in order, until one is not there."""
    async with target.connect(terminal) as api:
        for job_id in dict.fromkeys(await find_jobs(api, jobs)):
            await existing_job(api, job_id)
            with about(job_id):
                await api.delete_job(job_id)
            terminal.say(f"job {printable(job_id)}: deleted")
            terminal.give({"job_id": job_id, "deleted": True})
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
        out: Destination,
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
            self._run = run_of(reply, server=self._target.named)
            end = Following(words=(), out=self._out)
            return await follow_to_end(api, self._target, self._terminal, self._run, end)

    async def salvage(self, server: str) -> None:
        """Stop the run and download the results so far."""
        if self._run is None:
            return
        self.farewell = (
            f"interrupted; only a part of the results is in {clean(str(self._out.path))}"
        )
        self._terminal.warn(
            "stopping and saving the results so far; interrupt again to quit at once"
        )
        async with connect(server, self._target.api_key, self._target.pace) as api:
            run = await self._stopped(api, self._run)
            self._terminal.say(summary(run))
            self._terminal.give(run)
            with meter_for(sys.stderr, api.pace) as meter:
                done = await download(api, run, self._out, meter)
        _tell_of_files(self._terminal, done, self._out)
        self.farewell = "interrupted; the results so far are kept"

    async def _stopped(self, api: Api, run: RunReply) -> RunReply:
        try:
            return await api.change_run(run.job_id, "stop")
        except ServerRefused:
            # The run had already ended.
            return await api.run(run.job_id, run.run_id)
