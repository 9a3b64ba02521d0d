"""Shell completion: the scripts for bash, zsh and fish, and the answers to them.

click makes both from the commands themselves. An argument JOB is completed from the server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

SHELLS = ("bash", "zsh", "fish")
PROGRAM = "conveyor"
SUGGESTED_JOBS = 50
PATIENCE = 2.0
"""Seconds for the server: a shell is waiting."""


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> int:
    """Print the script that completes commands, options and job ids in a shell.

    bash, zsh: put eval "$(conveyor completion bash)" into ~/.bashrc, or with zsh into ~/.zshrc.
    fish: put conveyor completion fish | source into ~/.config/fish/config.fish.
    """
    return complete(context.find_root().command, f"{shell}_source")


def complete(command: click.Command, instruction: str) -> int:
    """Print a script, or the completions that one asks for; return the exit code."""
    from click.shell_completion import shell_complete

    from conveyor.settings import COMPLETION_VARIABLE

    return shell_complete(command, {}, PROGRAM, COMPLETION_VARIABLE, instruction)


def suggest_jobs(
    context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Suggest `last` and the newest jobs of the server that begin like the word so far, of as many
    as a command looks through for such a beginning."""
    import anyio
    from click.shell_completion import CompletionItem

    from conveyor.client.jobs import NEWEST

    newest = CompletionItem(NEWEST, help="the newest job")
    items = [newest, *anyio.run(_jobs, context.params, incomplete)]
    # Shells drop completions that do not begin with the word as it was typed.
    return [item for item in items if item.value.startswith(incomplete)]


async def _jobs(params: dict[str, Any], incomplete: str) -> list[CompletionItem]:
    from contextlib import aclosing

    import anyio
    from click.shell_completion import CompletionItem

    from conveyor.cli.commands import target_of
    from conveyor.client.api import Patience, connect
    from conveyor.client.errors import ClientError
    from conveyor.client.jobs import SEARCHED, newest_jobs
    from conveyor.client.output import printable, shorten

    target = target_of(params.get("server"), params.get("api_key"))
    patience = Patience(give_up=PATIENCE)
    found: list[CompletionItem] = []
    try:
        async with connect(target.server, target.api_key, target.pace, patience=patience) as api:
            with anyio.move_on_after(PATIENCE):
                async with aclosing(newest_jobs(api, SEARCHED)) as jobs:
                    async for job in jobs:
                        if job.job_id.startswith(incomplete):
                            name = shorten(printable(job.name or ""), 40)
                            found.append(CompletionItem(job.job_id, help=name))
                        # Newest first is by falling ids: no later one begins like the word.
                        is_past = job.job_id[: len(incomplete)] < incomplete
                        if is_past or len(found) == SUGGESTED_JOBS:
                            break
    except ClientError:
        # A message would end up in the command line that is being typed.
        pass
    return found
