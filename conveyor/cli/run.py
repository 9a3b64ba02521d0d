"""`conveyor run`: server, job and results in one process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from conveyor.cli.commands import job_options, reason, report_error, target_of, tasks_of, unfit
from conveyor.client.options import (
    Directory,
    file_options,
    gateway_options,
    json_option,
    own_out_option,
    task_options,
)
from conveyor.client.program import INTERRUPTED, Failure, Interruption

if TYPE_CHECKING:
    from conveyor.client.directory import Destination
    from conveyor.client.inputs import OpenInput
    from conveyor.client.submit import JobOptions
    from conveyor.settings import Settings


@click.command()
@click.argument("inputs", nargs=-1, required=True, metavar="FILE|-|URL...")
@own_out_option
@file_options
@task_options
@gateway_options
@click.option(
    "--data-dir",
    type=Directory(path_type=Path),
    metavar="DIR",
    help="Keep the job in DIR [not kept].",
)
@click.option(
    "--api-key", metavar="KEY", help="API key for the gateway [ZENROWS_API_KEY, else local]."
)
@json_option
def run(
    inputs: tuple[str, ...],
    out: Destination,
    data_dir: Path | None,
    api_key: str | None,
    as_json: bool,
    **flags: Any,
) -> int:
    """Scrape URLs, or the tasks of a file as submit takes it, into a directory, without a server.

    Everything happens in this process. An interrupt keeps the results so far; a second one quits at
    once.
    """
    from conveyor.settings import InvalidSetting, from_environment

    server_flags = {name: flags.pop(name) for name in ("gateway", "allow_private", "workers")}
    try:
        settings = from_environment(
            host="127.0.0.1", port=0, public_url="", log_level="error", **server_flags
        )
    except InvalidSetting as error:
        raise unfit(error, server_flags) from None
    with tasks_of(inputs, flags) as tasks:
        options = job_options(flags)
        return _whole_job(
            settings,
            tasks,
            options,
            out=out,
            data_dir=data_dir,
            api_key=api_key,
            as_json=as_json,
        )


def _whole_job(
    settings: Settings,
    tasks: list[Any] | OpenInput,
    options: JobOptions,
    *,
    out: Destination,
    data_dir: Path | None,
    api_key: str | None,
    as_json: bool,
) -> int:
    from conveyor.client.commands import JobSession
    from conveyor.domain.errors import ConveyorError
    from conveyor.roles.run import run_once
    from conveyor.roles.serving import fit_to_files

    with report_error(as_json=as_json) as terminal:
        out.prepare()
        settings, slots = fit_to_files(settings)
        if slots:
            terminal.warn(f"conveyor: {slots}")
        job = JobSession(target_of(None, api_key, lasts=False), terminal, tasks, options, out=out)
        try:
            code = run_once(settings, job, data_dir=data_dir, beside=out.path)
        except (ConveyorError, ExceptionGroup) as error:
            raise Failure(reason(error)) from None
    if code == INTERRUPTED:
        raise Interruption(job.farewell)
    return code
