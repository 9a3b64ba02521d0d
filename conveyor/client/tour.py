"""A job from URLs to files, shown as it goes: what the demonstration runs."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TextIO

from conveyor.client.api import Pace, connect
from conveyor.client.download import download
from conveyor.client.inputs import SourcedTask
from conveyor.client.progress import view_for
from conveyor.client.submit import JobOptions, submit
from conveyor.client.watch import follow, summary


async def tour(
    server: str,
    api_key: str,
    urls: Mapping[str, str],
    directory: Path,
    *,
    pace: Pace,
    say: Callable[[str], None],
    stream: TextIO | None,
) -> None:
    """Scrape the URLs, named by their external ids, into a folder of `directory` for the job.

    Progress goes to the stream, where there is one. Raises ClientError.
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
        done = await download(api, reply.job_id, folder, run_id=run.run_id)
    for problem in done.problems:
        say(f"not downloaded: {problem}")
    say(f"results are in {folder}")
