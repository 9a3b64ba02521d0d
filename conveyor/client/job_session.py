"""Run one job from its tasks to its files, on a server that exists for it alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from conveyor.client.api import Api, connect
from conveyor.client.commands import Following, ServerTarget, Terminal, follow_to_end, make_job
from conveyor.client.download import download
from conveyor.client.errors import ServerRefused
from conveyor.client.inputs import OpenInput, SourcedTask
from conveyor.client.output import clean, count
from conveyor.client.submit import JobOptions
from conveyor.client.watch import summary
from conveyor.client.wire import RunReply


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
