"""`conveyor-dev --demo`: run a job over a small moody site, and kill the server in its middle.

A server in a process of its own begins the job. It is killed, and the server of this process takes
its data directory over and ends the job, as after any crash.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import msgspec
from anyio.abc import TaskStatus
from anyio.from_thread import start_blocking_portal

from conveyor.client.api import Api, ClientClock, connect
from conveyor.client.directory import Destination
from conveyor.client.download import download
from conveyor.client.inputs import SourcedTask
from conveyor.client.output import command
from conveyor.client.progress import ProgressView, meter_for, view_for
from conveyor.client.submit import JobOptions, submit
from conveyor.client.watch import follow, run_of, summary
from conveyor.client.wire import RunReply
from conveyor.demo.site import Moods, pages, serve_site
from conveyor.roles.banner import BannerPrinter
from conveyor.roles.dev import ServerInfo, run
from conveyor.roles.serving import STOP_SIGNALS
from conveyor.settings import Settings, from_environment

RESULTS = "demo-results"
JOB = JobOptions(name="demo", max_inflight=3, max_attempts=5)
KILLED_AFTER = 0.4
"""The share of the tasks that ends before the kill."""
_LOOK = 0.1
_VICTIM = "from conveyor.demo.run import serve_until_killed; serve_until_killed()"


def run_demo(flags: Mapping[str, Any], banner: BannerPrinter, key: str, pace: ClientClock) -> int:
    """Serve until stopped, and run the job over the site meanwhile; return the exit code.

    Raises ConveyorError if the server cannot start.
    """
    settings, note = _settings(flags)
    with ExitStack() as stack:
        moods = Moods()
        tour = Tour(stack.enter_context(serve_site(moods=moods)), moods, key, pace, banner)
        is_shown = False
        try:
            with _signals_interrupt(), _victim(settings) as victim:
                if victim is not None:
                    settings = replace(settings, port=urlsplit(victim.api).port or settings.port)
                    if not banner.as_json:
                        banner.ready(victim, settings, note=note)
                        is_shown = True
                    anyio.run(_unless_stopped, tour.begin, victim.api)
        except KeyboardInterrupt:
            banner.stopping()
            return 0
        demonstration = _Demonstration(stack, tour, banner)

        def ready(info: ServerInfo) -> None:
            if not is_shown:
                banner.ready(info, settings, note=note)
            demonstration.start(info)

        def stopping() -> None:
            demonstration.stop()
            banner.stopping()

        return run(settings, on_ready=ready, on_stopping=stopping)


def _settings(flags: Mapping[str, Any]) -> tuple[Settings, str | None]:
    """Complete the flags: allow the site's loopback address, and choose another port if 9000 is
    taken.

    Also returns the line to print about the port once the server is ready.
    """
    wanted = {**flags, "allow_private": True}
    settings = from_environment(**wanted)
    if flags["port"] is None and _is_port_in_use(settings.host, settings.port):
        note = f"port {settings.port} is taken; using a free one"
        return from_environment(**{**wanted, "port": 0}), note
    return settings, None


def _is_port_in_use(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Let the signals that stop a server raise KeyboardInterrupt meanwhile."""
    former = {number: signal.signal(number, _interrupt) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


async def _unless_stopped(work: Callable[[str], Awaitable[None]], server: str) -> None:
    """Do the work. Raises KeyboardInterrupt, once it is cancelled, after a signal that stops a
    server."""
    is_stopped = False
    async with anyio.create_task_group() as group:

        async def listen(*, task_status: TaskStatus[None]) -> None:
            nonlocal is_stopped
            with anyio.open_signal_receiver(*STOP_SIGNALS) as signals:
                task_status.started()
                async for _ in signals:
                    is_stopped = True
                    group.cancel_scope.cancel()

        await group.start(listen)
        await work(server)
        group.cancel_scope.cancel()
    if is_stopped:
        raise KeyboardInterrupt


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


@contextmanager
def _victim(settings: Settings) -> Iterator[ServerInfo | None]:
    """Run a server in a process of its own, and kill it at the end of the block.

    Yields None if it does not start: the server that follows says why.
    """
    with subprocess.Popen(
        [sys.executable, "-c", _VICTIM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with suppress(BrokenPipeError):
                process.stdin.write(msgspec.json.encode(settings) + b"\n")
                process.stdin.flush()
            line = process.stdout.readline()
            yield msgspec.json.decode(line, type=ServerInfo) if line else None
        finally:
            process.kill()


def serve_until_killed() -> None:
    """Serve with the settings on the first line of the input, until the input ends."""
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=Settings)

    def ready(info: ServerInfo) -> None:
        sys.stdout.write(msgspec.json.encode(info).decode() + "\n")
        sys.stdout.flush()

    def end_with_the_input() -> None:
        sys.stdin.buffer.read()
        os._exit(1)

    threading.Thread(target=end_with_the_input, daemon=True).start()
    run(settings, on_ready=ready)


class _Demonstration:
    """Ends the job as any client would, on an event loop beside the server's."""

    def __init__(self, stack: ExitStack, tour: Tour, banner: BannerPrinter) -> None:
        self._stack = stack
        self._tour = tour
        self._banner = banner
        self._under_way: Future[None] | None = None
        self._is_over = False

    def start(self, info: ServerInfo) -> None:
        """Go on with the job unless the server was already stopped; return at once."""
        if self._is_over:
            return
        # Only now: a signal during the start finds no thread to wait for.
        portal = self._stack.enter_context(start_blocking_portal())
        directory = Path(info.data_dir).resolve() / RESULTS
        self._under_way = portal.start_task_soon(self._tour.end, info.api, directory)
        self._under_way.add_done_callback(self._tell)

    def stop(self) -> None:
        """Cancel the job."""
        self._is_over = True
        if self._under_way is not None:
            self._under_way.cancel()

    def _tell(self, ended: Future[None]) -> None:
        error = None if ended.cancelled() else ended.exception()
        if error is not None:
            self._banner.say(f"the demonstration failed: {error}")


class Tour:
    """The job over the pages of a site, named by their external ids, and what is said of it."""

    def __init__(
        self, site: str, moods: Moods, key: str, pace: ClientClock, banner: BannerPrinter
    ) -> None:
        self._site = site
        self._moods = moods
        self._key = key
        self._pace = pace
        self._banner = banner
        self._run: RunReply | None = None
        self._started = pace.monotonic()

    async def begin(self, server: str) -> None:
        """Submit the job, and return in the middle of it. Raises ClientError."""
        async with connect(server, self._key, self._pace) as api:
            run = await self._submitted(api)
            enough = run.stats.total * KILLED_AFTER
            with self._view(server) as view:
                while run.live and run.stats.completed < enough:
                    await self._pace.sleep(_LOOK)
                    run = await api.run(run.job_id, run.run_id)
                    view.show(run, self._pace.monotonic())
        self._run = run
        done = f"{run.stats.completed} of {run.stats.total}"
        self._banner.say(f"kill -9 of the server at {done}; another one takes over")

    async def end(self, server: str, directory: Path) -> None:
        """Follow the job to its end, put its pages into `directory`, in place of an earlier job's,
        and say what became of them. Raises ClientError."""
        async with connect(server, self._key, self._pace) as api:
            run = self._run or await self._submitted(api)
            run = await follow(api, run, self._view(server))
            self._banner.say(summary(run, self._pace.monotonic() - self._started))
            shutil.rmtree(directory, ignore_errors=True)
            with meter_for(self._banner.stream or io.StringIO(), self._pace) as meter:
                done = await download(api, run, Destination(directory), meter)
            rows = [row async for row, _raw in api.results(run.job_id, run_id=run.run_id)]
        for problem in done.problems:
            self._banner.say(f"not downloaded: {problem}")
        tasks = {row.task_id for row in rows}
        lost = len(pages()) - len({row.external_id for row in rows if row.succeeded})
        twice = len(rows) - len(tasks) + max(run.stats.completed - len(tasks), 0)
        self._banner.say(f"{lost} lost, {twice} counted twice{self._troubles()}")
        self._banner.say(f"results are in {directory}")
        self._banner.say(f"next: {command('results', run.job_id, server=self._named(server))}")
        self._banner.say("still serving; Ctrl-C stops")

    async def _submitted(self, api: Api) -> RunReply:
        tasks = [
            SourcedTask(body={"url": f"{self._site}/{name}", "external_id": name}, source=name)
            for name in pages()
        ]
        self._banner.say(f"\n{len(tasks)} pages of {self._site}/, three at a time")
        self._started = self._pace.monotonic()
        self._run = run = run_of(await submit(api, tasks, JOB))
        return run

    def _view(self, server: str) -> ProgressView:
        return view_for(self._banner.stream or io.StringIO(), server)

    def _troubles(self) -> str:
        """Return what the site did, in words."""
        told = [f"{count} × {trouble}" for trouble, count in self._moods.troubles.items()]
        return f", with {', '.join(told)} and a kill -9 on the way" if told else ""

    @staticmethod
    def _named(server: str) -> str | None:
        """Return the server as the command has to be told it, None for the one it looks for."""
        return None if urlsplit(server).port == Settings().port else server
