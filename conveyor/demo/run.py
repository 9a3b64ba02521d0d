"""`conveyor-dev --demo`: start a server and a small site, and run a job over the site."""

from __future__ import annotations

import errno
import io
import socket
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

from anyio.from_thread import start_blocking_portal

from conveyor.client.api import ClientClock, connect
from conveyor.client.directory import Destination
from conveyor.client.download import download
from conveyor.client.inputs import SourcedTask
from conveyor.client.progress import meter_for, view_for
from conveyor.client.submit import JobOptions, submit
from conveyor.client.watch import follow, summary
from conveyor.demo.site import pages, serve_site
from conveyor.roles.banner import BannerPrinter
from conveyor.roles.dev import ServerInfo, run
from conveyor.settings import Settings, from_environment

RESULTS = "demo-results"

Job = Callable[[str, Mapping[str, str], Path, BannerPrinter], Awaitable[None]]
"""Shows a job: takes the address of the API, URLs by name, a directory, and a function that prints.
"""


def run_demo(flags: Mapping[str, Any], banner: BannerPrinter, job: Job) -> int:
    """Serve until stopped, and once ready run the job over the site; return the exit code.

    Raises ConveyorError if the server cannot start.
    """
    settings, note = _settings(flags)
    with serve_site() as site, ExitStack() as threads:
        demonstration = _Demonstration(threads, site, job, banner)

        def ready(info: ServerInfo) -> None:
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


class _Demonstration:
    """Runs the job as any client would, on an event loop beside the server's."""

    def __init__(self, threads: ExitStack, site: str, job: Job, banner: BannerPrinter) -> None:
        self._threads = threads
        self._site = site
        self._job = job
        self._banner = banner
        self._under_way: Future[None] | None = None
        self._is_over = False

    def start(self, info: ServerInfo) -> None:
        """Start the job unless it was already stopped; return at once."""
        if self._is_over:
            return
        # Only now: a signal during the start finds no thread to wait for.
        portal = self._threads.enter_context(start_blocking_portal())
        self._under_way = portal.start_task_soon(
            self._show, info.api, Path(info.data_dir).resolve() / RESULTS
        )
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

    async def _show(self, api: str, directory: Path) -> None:
        urls = {name: f"{self._site}/{name}" for name in pages()}
        self._banner.say(f"\n{len(urls)} pages of {self._site}/")
        await self._job(api, urls, directory, self._banner)
        self._banner.say("still serving; Ctrl-C stops")


async def tour(
    server: str,
    api_key: str,
    urls: Mapping[str, str],
    directory: Path,
    *,
    pace: ClientClock,
    say: Callable[[str], None],
    stream: TextIO | None,
) -> None:
    """Scrape the URLs, named by their external ids, into a folder of `directory` for the job.

    Shows progress on the stream, if there is one. Raises ClientError.
    """
    tasks = [
        SourcedTask(body={"url": url, "external_id": name}, source=name)
        for name, url in urls.items()
    ]
    async with connect(server, api_key, pace) as api:
        started = pace.monotonic()
        reply = await submit(api, tasks, JobOptions(name="demo"))
        run = await follow(api, reply.latest_run, view_for(stream or io.StringIO(), server))
        say(summary(run, pace.monotonic() - started))
        folder = directory / reply.job_id
        with meter_for(stream or io.StringIO(), pace) as meter:
            done = await download(api, run, Destination(folder), meter)
    for problem in done.problems:
        say(f"not downloaded: {problem}")
    say(f"results are in {folder}")
