"""Explain in a sentence or two why a job is not faster or stands still, and which command helps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from conveyor.client.api import Api
from conveyor.client.commands import ServerTarget, Terminal, about
from conveyor.client.jobs import find_job
from conveyor.client.listing import cause_line, held_host_line, waiting_line
from conveyor.client.output import command, count, printable
from conveyor.client.program import SUCCEEDED
from conveyor.client.watch import summary
from conveyor.client.wire import (
    FailureGroupReply,
    HostReply,
    HostsReply,
    JobReply,
    OutageReply,
    ResultRow,
    RunReply,
    RunWaitReply,
)
from conveyor.domain.model import JobStatus, RunStatus
from conveyor.domain.run_waits import FLEET_PAUSED, FOR_WANT_OF, RunWaitReason

HOSTS_SHOWN = 3
"""Hosts that hold a job back which are named."""
CAUSES_SHOWN = 3
"""Kinds of failures that are named."""
ON_THE_HOST = frozenset({"worker", "admin"})
"""Commands that talk to no server."""
OUTAGE_FIRST = frozenset(RunWaitReason) - {
    RunWaitReason.PAUSED,
    RunWaitReason.INGESTING,
    RunWaitReason.NO_WORKER,
    RunWaitReason.QUEUE_LOST,
    RunWaitReason.PERMITS_CLOSED,
}
"""Reasons in whose place an outage is told. The others hold a run back before it."""


class Explanation(NamedTuple):
    """The state of a job, the way to help it (empty if nothing is to be done), and the words of the
    `conveyor` command for that. `program` is the command in its place where it is another one.
    `details` stand below the state, a line each."""

    why: str
    helps: str = ""
    words: tuple[str, ...] = ()
    program: str = ""
    details: tuple[str, ...] = ()


async def explain_job(target: ServerTarget, terminal: Terminal, text: str) -> int:
    """Print the explanation of a job, and the command that helps."""
    async with target.connect(terminal) as api:
        job_id = await find_job(api, text)
        with about(job_id):
            job = await api.job(job_id)
            found, hosts = explain(job), tuple[HostReply, ...]()
            run = job.latest_run
            if run is not None and may_be_held(run):
                held = await api.held_hosts(job_id, run.run_id)
                found, hosts = held_back(job, found, held), held.hosts
                if not hosts and run.waiting is not None:
                    found = found._replace(details=await _waiting_task(api, run))
            if run is not None and may_tell_failures(run):
                found = failing(run, found, await _causes(api, target, run))
        if found.words and found.words[0] in ON_THE_HOST and await api.serves_development():
            found = in_development(job, found)
    help_command = found.program
    if found.words:
        on_the_host = found.words[0] in ON_THE_HOST
        help_command = command(*found.words) if on_the_host else target.command(*found.words)
    helps = ": ".join(filter(None, (found.helps, help_command)))
    _say(terminal, f"job {printable(job_id)}: {found.why}", found.details, helps)
    terminal.give(
        {
            "job_id": job_id,
            "run_id": None if run is None else run.run_id,
            "status": job.status if run is None else run.status,
            "waiting": None if run is None else msgspec.to_builtins(run.waiting),
            "explanation": found.why,
            "details": found.details,
            "hosts": hosts,
            "helps": found.helps or None,
            "command": help_command or None,
        }
    )
    return SUCCEEDED


def _say(terminal: Terminal, why: str, details: Sequence[str], helps: str) -> None:
    """Print an explanation: in a line, or with its details below."""
    if not details:
        terminal.say(f"{why}. {helps}" if helps else why)
        return
    terminal.say(f"{why}:")
    for detail in details:
        terminal.say(f"  {detail}")
    if helps:
        terminal.say(helps)


def explain(job: JobReply) -> Explanation:
    """Explain a job by what its server says of it."""
    run = job.latest_run
    if job.status == JobStatus.DELETED:
        return Explanation("deleted; what is left of it is being removed")
    if run is None:
        return _without_run(job)
    if run.live:
        return _live(job, run)
    return _ended(job, run)


def in_development(job: JobReply, found: Explanation) -> Explanation:
    """Explain a job of a development server, for which a command for production is no help."""
    run = job.latest_run
    wait = None if run is None else run.waiting
    helps, program = _DEVELOPMENT_HELP.get("" if wait is None else wait.reason, ("", ""))
    return found._replace(helps=helps, words=(), program=program)


def may_be_held(run: RunReply) -> bool:
    """Tell whether the limits of hosts may be all that holds a run back."""
    reason = None if run.waiting is None else run.waiting.reason
    is_running = run.status == RunStatus.RUNNING and not run.paused
    return is_running and not _outage(run) and reason in (None, RunWaitReason.HOST_CLOSED)


async def _waiting_task(api: Api, run: RunReply) -> tuple[str, ...]:
    """Name a task that waits, of a host without a limit: only its worker knows that it paused."""
    page = await api.results_page(run.job_id, run.run_id, status="processing", limit=1)
    return tuple(waiting_line(row) for row, _ in page.rows if row.waiting is not None)


def held_back(job: JobReply, found: Explanation, held: HostsReply) -> Explanation:
    """Explain a job with the hosts that hold it back, if there are any."""
    run = job.latest_run
    assert run is not None
    if not held.hosts:
        return found
    is_whole = held.counted_tasks >= held.tasks
    details = [held_host_line(host, is_whole=is_whole) for host in held.hosts[:HOSTS_SHOWN]]
    if more := len(held.hosts) + held.more_hosts - len(details):
        details.append(f"and {count(more, 'more host')}")
    if not is_whole:
        details.append(f"counted among {held.counted_tasks:,} of {count(held.tasks, 'task')}")
    # Whether a host is at a limit or asked for a pause, and until when, its line says.
    stats = run.stats
    done = f"{stats.completed:,} of {count(stats.total, 'task')} done"
    hold = "its host holds" if len(held.hosts) + held.more_hosts == 1 else "its hosts hold"
    return found._replace(
        why=f"{done}; {hold} it back",
        helps="It goes on by itself. All its hosts",
        words=("hosts", job.job_id),
        details=tuple(details),
    )


def may_tell_failures(run: RunReply) -> bool:
    """Tell whether what failed explains a run: of a live one, if at least half of its tasks do."""
    failed, completed = run.stats.failed, run.stats.completed
    return failed > 0 and (not run.live or 2 * failed >= completed)


def failing(run: RunReply, found: Explanation, causes: Sequence[str]) -> Explanation:
    """Explain a run with the causes of its failures."""
    why = found.why
    if run.live:
        why += f"; {run.stats.failed:,} of those done failed"
    return found._replace(why=why, details=(*found.details, *causes))


async def _causes(api: Api, target: ServerTarget, run: RunReply) -> list[str]:
    """Name the most frequent causes of the failures of a run, each with a task as an example."""
    found = (await api.failures(run.job_id, run.run_id)).groups
    lines = [cause_line(group, await _example(api, run, group)) for group in found[:CAUSES_SHOWN]]
    if more := found[CAUSES_SHOWN:]:
        tasks, kinds = sum(group.count for group in more), count(len(more), "other kind")
        every = target.command("failures", run.job_id)
        lines.append(f"{count(tasks, 'task')} failed in {kinds}: {every}")
    return lines


async def _example(api: Api, run: RunReply, group: FailureGroupReply) -> ResultRow | None:
    """Return a task of a group; None if there is none among the first rows."""
    if group.reason is None:
        return None
    page = await api.results_page(
        run.job_id, run.run_id, status="failed", group=group.group, limit=1
    )
    return page.rows[0][0] if page.rows else None


def _without_run(job: JobReply) -> Explanation:
    if job.schedule is None:
        return Explanation("all its runs are deleted", "Run it again", ("rerun", job.job_id))
    if job.schedule_state == "paused":
        return Explanation(
            "its schedule is paused, and it never ran",
            "Let it fire again",
            ("schedule", "resume", job.job_id),
        )
    fires = ("Its fires", ("schedule", "show", job.job_id))
    if job.next_scheduled_run is None:
        return Explanation("it never ran, and no fire follows", *fires)
    return Explanation(f"it fires first at {printable(job.next_scheduled_run)}", *fires)


def _ended(job: JobReply, run: RunReply) -> Explanation:
    why, stats = summary(run), run.stats
    if job.next_scheduled_run is not None:
        why += f"; the next run begins at {printable(job.next_scheduled_run)}"
    if stats.completed < stats.total:
        failed = ("--failed",) if stats.failed else ()
        return Explanation(
            why, "Work the rest", ("rerun", job.job_id, *failed, "--unfinished", "--watch")
        )
    if stats.failed:
        return Explanation(
            why, "Try the failed tasks again", ("rerun", job.job_id, "--failed", "--watch")
        )
    return Explanation(why, "Its results", ("results", job.job_id))


def _live(job: JobReply, run: RunReply) -> Explanation:
    stats = run.stats
    done = f"{stats.completed:,} of {count(stats.total, 'task')} done"
    if run.status == RunStatus.PENDING and not run.paused:
        return Explanation(
            f"{done}, and the job is open: it waits for more tasks, or for "
            f"POST /v1/jobs/{printable(job.job_id)}/close, which ends it"
        )
    watch = ("Follow it", ("watch", job.job_id))
    outage = _outage(run)
    if outage is not None:
        helps = _OUTAGE_HELP.get(outage.shared, "It goes on by itself")
        return Explanation(f"{done}; {_told(outage)}", helps, ("watch", job.job_id))
    if run.waiting is None:
        return Explanation(f"{done}; nothing holds it back", *watch)
    wait = run.waiting
    why = f"{done}; it waits because {printable(wait.detail)} ({printable(wait.reason)}"
    if wait.since:
        why += f", since {printable(wait.since)}"
    why += f", until {printable(wait.until)})" if wait.until else ")"
    return Explanation(why, *_HELP.get(wait.reason, _watching)(job, wait))


def _outage(run: RunReply) -> OutageReply | None:
    """Return the outage of a live run, unless something else holds it back first."""
    reason = None if run.waiting is None else run.waiting.reason
    is_first = not run.paused and (reason is None or reason in OUTAGE_FIRST)
    return run.outage if is_first else None


def _told(outage: OutageReply) -> str:
    told = printable(outage.detail or f"the {outage.shared} is away")
    if outage.shared == "result store":
        told = f"bodies cannot be stored: {told}"
    since = f"since {printable(outage.since)}" if outage.since else ""
    never = "nothing has answered since the server started" if outage.never_answered else ""
    more = "; ".join(filter(None, (since, never)))
    return f"{told} ({more})" if more else told


_OUTAGE_HELP = {
    "gateway": "Check the server's --gateway and its network; it then goes on by itself",
    "resolver": "Check the name servers of the server's machine; it then goes on by itself",
    "network": "Check the network of the server's machine; it then goes on by itself",
    "file descriptors": "Let the server open more files (ulimit -n); it goes on by itself as some "
    "are free",
    "result store": "Free room on the disk of its data directory, or mend the directory; it then "
    "goes on by itself",
}
"""By what is away. Only a development server tells outages."""


Help = Callable[[JobReply, RunWaitReply], tuple[str, tuple[str, ...]]]
"""Tell what helps a job that waits, and the words of the command."""


def _watching(job: JobReply, _wait: RunWaitReply) -> tuple[str, tuple[str, ...]]:
    return "It goes on by itself", ("watch", job.job_id)


def _resuming(job: JobReply, wait: RunWaitReply) -> tuple[str, tuple[str, ...]]:
    if wait.detail == FLEET_PAUSED:
        return "Its operator lets it go on", ("admin", "resume", "--fleet")
    return "Let it go on", ("resume", job.job_id)


def _starting(_job: JobReply, _wait: RunWaitReply) -> tuple[str, tuple[str, ...]]:
    return "Start workers, or look why they fell silent", ("worker",)


def _checking(_job: JobReply, _wait: RunWaitReply) -> tuple[str, tuple[str, ...]]:
    return "Free room, or bring the store of bodies back", ("admin", "check")


def _easing(job: JobReply, wait: RunWaitReply) -> tuple[str, tuple[str, ...]]:
    if wait.detail.startswith(FOR_WANT_OF):
        helps = "Check the workers' gateway and network; it then goes on by itself"
        return helps, ("watch", job.job_id)
    return "It goes on by itself, as fast as the gateway takes it", ("watch", job.job_id)


def _listing(job: JobReply, _wait: RunWaitReply) -> tuple[str, tuple[str, ...]]:
    return "It goes on by itself; its tasks say why they wait", ("results", job.job_id)


def _widening(job: JobReply, _wait: RunWaitReply) -> tuple[str, tuple[str, ...]]:
    more = str(2 * max(1, job.max_inflight))
    return "A job gets more with", ("submit", "FILE", "--max-inflight", more)


def _growing(_job: JobReply, _wait: RunWaitReply) -> tuple[str, tuple[str, ...]]:
    return "More workers help", ("worker",)


_HELP: dict[str, Help] = {
    RunWaitReason.PAUSED: _resuming,
    RunWaitReason.NO_WORKER: _starting,
    RunWaitReason.BODIES_NOT_KEPT: _checking,
    RunWaitReason.GATEWAY_THROTTLED: _easing,
    RunWaitReason.HOST_CLOSED: _listing,
    RunWaitReason.RETRY_BACKOFF: _listing,
    RunWaitReason.MAX_INFLIGHT: _widening,
    RunWaitReason.SLOTS: _growing,
}
"""By reason; the others end by themselves."""

_DEVELOPMENT_HELP: dict[str, tuple[str, str]] = {
    RunWaitReason.PAUSED: ("Press p in the terminal of its server", ""),
    RunWaitReason.NO_WORKER: ("Look why its server fell silent, or start it again", "conveyor-dev"),
    RunWaitReason.BODIES_NOT_KEPT: ("Free room on the disk of its data directory", ""),
    RunWaitReason.SLOTS: ("It gets more slots with", "conveyor-dev --workers N"),
}
"""By reason, the way to help and the command, if there is one."""
