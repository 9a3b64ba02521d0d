"""The commands about events: signing keys, webhooks of jobs, their log, and listening to it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from conveyor.cli.commands import report_error, run_client, show_help
from conveyor.cli.completion import suggest_jobs
from conveyor.client.options import json_option, moment_option, rows_option, server_options

if TYPE_CHECKING:
    from conveyor.client.commands import ServerTarget, Terminal

EVENTS = ("run.completed", "run.failed", "run.stopped")
STATUSES = ("pending", "delivered", "failed", "dropped")

job_argument = click.argument("job", shell_complete=suggest_jobs)
job_option = click.option(
    "--job", metavar="JOB", shell_complete=suggest_jobs, help="Only events of JOB [all jobs]."
)


def webhook_of(flags: dict[str, Any]) -> dict[str, Any] | None:
    """Take the options of a webhook out of the flags, and build the webhook of the wire; None
    without one."""
    url, signed = flags.pop("webhook_url"), flags.pop("signed")
    if url is None:
        if signed:
            raise click.UsageError("--sign needs --webhook")
        return None
    return {"url": url, "signature": signed}


@click.group(invoke_without_command=True, no_args_is_help=False)
@click.pass_context
def keys(context: click.Context) -> None:
    """Rotate the keys that sign your events."""
    show_help(context)


@keys.command("list")
@json_option
@server_options
def list_keys(**common: Any) -> int:
    """List your keys, without their secrets."""
    from conveyor.client import webhooks

    return run_client(webhooks.list_keys, **common)


@keys.command()
@json_option
@server_options
def rotate(**common: Any) -> int:
    """Make the first key, or a candidate beside the active one.

    Standard output gets the secret and nothing else. No other command shows it.
    """
    from conveyor.client import webhooks

    return run_client(webhooks.rotate_key, **common)


@keys.command()
@json_option
@server_options
def finalize(**common: Any) -> int:
    """Let the candidate take the place of the active key."""
    from conveyor.client import webhooks

    return run_client(webhooks.finalize_key, **common)


@keys.command()
@json_option
@server_options
def cancel(**common: Any) -> int:
    """Remove the candidate."""
    from conveyor.client import webhooks

    return run_client(webhooks.cancel_rotation, **common)


@click.group(invoke_without_command=True, no_args_is_help=False)
@click.pass_context
def webhook(context: click.Context) -> None:
    """Say where the events of a job go, see what became of them, and send them again."""
    show_help(context)


@webhook.command()
@click.argument("url")
@click.option("--sign", "signed", is_flag=True, help="Sign the event with your active key.")
@json_option
@server_options
def test(url: str, signed: bool, **common: Any) -> int:
    """Have the server post a test event to URL.

    Exit code 1 if it does not arrive.
    """
    from conveyor.client import webhooks

    return run_client(
        lambda target, terminal: webhooks.test_webhook(target, terminal, url, signed=signed),
        **common,
    )


@webhook.command()
@job_argument
@json_option
@server_options
def show(job: str, **common: Any) -> int:
    """Show the webhook of JOB, and how its receiver does."""
    from conveyor.client import webhooks

    return run_client(
        lambda target, terminal: webhooks.show_webhook(target, terminal, job), **common
    )


@webhook.command("set")
@job_argument
@click.argument("url")
@click.option("--sign", "signed", is_flag=True, help="Sign the events with your active key.")
@click.option(
    "--event",
    "events",
    type=click.Choice(EVENTS),
    multiple=True,
    help="Send these events [as before; at first run.completed and run.failed].",
)
@json_option
@server_options
def set_webhook(job: str, url: str, signed: bool, events: tuple[str, ...], **common: Any) -> int:
    """Post the events of JOB to URL from now on.

    Also those that are still owed. Without --sign they are not signed.
    """
    from conveyor.client import webhooks

    document = {"url": url, "signature": signed, **({"events": list(events)} if events else {})}
    return run_client(
        lambda target, terminal: webhooks.set_webhook(target, terminal, job, document), **common
    )


@webhook.command("rm")
@job_argument
@json_option
@server_options
def remove_webhook(job: str, **common: Any) -> int:
    """Send no more events of JOB; drop what is owed."""
    from conveyor.client import webhooks

    return run_client(
        lambda target, terminal: webhooks.remove_webhook(target, terminal, job), **common
    )


@webhook.command()
@click.argument("delivery", required=False)
@job_option
@click.option("--status", type=click.Choice(STATUSES), help="Only these deliveries.")
@moment_option("--since", "Only events made since then.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True)
@rows_option
@server_options
def log(
    delivery: str | None,
    job: str | None,
    status: str | None,
    since: str | None,
    limit: int,
    **common: Any,
) -> int:
    """List deliveries, newest first, or the attempts at one; last is the newest.

    Times are UTC.
    """
    from conveyor.client import webhooks

    if delivery is not None and (job, status, since) != (None, None, None):
        raise click.UsageError("DELIVERY stands alone: leave out --job, --status and --since")

    async def work(target: ServerTarget, terminal: Terminal) -> int:
        if delivery is not None:
            return await webhooks.show_delivery(target, terminal, delivery)
        return await webhooks.list_deliveries(
            target,
            terminal,
            job,
            webhooks.LogFilter(status, since, limit),
            jsonl=common["as_json"],
        )

    return run_client(work, **common)


@webhook.command()
@click.argument("deliveries", nargs=-1, metavar="[DELIVERY...]")
@click.option(
    "--status", type=click.Choice(STATUSES), help="With --since: these deliveries [failed]."
)
@moment_option("--since", "All events made since then, in place of DELIVERY.")
@moment_option("--until", "With --since: only those made before then.")
@json_option
@server_options
def replay(
    deliveries: tuple[str, ...],
    status: str | None,
    since: str | None,
    until: str | None,
    **common: Any,
) -> int:
    """Send events again, with the same ids and bytes.

    Name each DELIVERY (last is the newest), or with --since all that failed since then, 1,000 at
    most.
    """
    from conveyor.client import webhooks

    if bool(deliveries) == (since is not None):
        raise click.UsageError("name deliveries, or a window with --since")
    if since is None and (status, until) != (None, None):
        raise click.UsageError("--status and --until need --since")
    window = {"status": status or "failed", "since": since}
    if until is not None:
        window["until"] = until

    async def work(target: ServerTarget, terminal: Terminal) -> int:
        if deliveries:
            return await webhooks.replay_deliveries(target, terminal, deliveries)
        return await webhooks.replay_window(target, terminal, window)

    return run_client(work, **common)


@webhook.command()
@click.argument("event", type=click.Choice([*EVENTS, "webhook.test"]))
@click.option(
    "--secret",
    "secrets",
    multiple=True,
    metavar="SECRET|-",
    help="Sign with this secret; a second one is the candidate's; - reads standard input.",
)
@click.option("--kid", default="01J00000000000000000000KEY", show_default=True, help="Key id.")
@json_option
def sample(event: str, secrets: tuple[str, ...], kid: str, as_json: bool) -> int:
    """Print a made-up EVENT, for tests of receivers.

    Headers, an empty line, and the body as it would be sent. Needs no server.
    """
    from conveyor.client.samples import sample_event
    from conveyor.clock import SystemClock

    if len(secrets) > 2:
        raise click.UsageError("an event has two signatures at most: give --secret twice")
    given = [sys.stdin.readline().strip() if secret == "-" else secret for secret in secrets]
    with report_error(as_json=as_json) as terminal:
        try:
            headers, body = sample_event(event, given, kid=kid, clock=SystemClock())
        except ValueError as error:
            raise click.UsageError(f"--secret: {error}") from None
        if as_json:
            terminal.give({"headers": headers, "body": body.decode()})
        else:
            lines = "".join(f"{name}: {value}\n" for name, value in headers.items())
            click.echo(lines.encode() + b"\n" + body, nl=False)
    return 0


def _receiver(_context: click.Context, _option: click.Parameter, value: str) -> str:
    """Refuse what is no address of a receiver."""
    from conveyor.client.api import web_address
    from conveyor.client.errors import ClientError

    try:
        web_address(value, "not an http or https address")
    except ClientError as error:
        raise click.BadParameter(str(error)) from None
    return value


@click.command()
@click.option(
    "--forward-to",
    "url",
    required=True,
    metavar="URL",
    callback=_receiver,
    help="Receiver, such as a local program.",
)
@job_option
@moment_option("--since", "Begin with the events made since then [from now on].")
@json_option
@server_options
def listen(url: str, job: str | None, since: str | None, **common: Any) -> int:
    """Hand events on to a local receiver, until interrupted.

    The server need not reach it. Events are those of jobs that have a webhook, to any URL:
    conveyor submit FILE --webhook URL, or conveyor webhook set JOB URL.

    Follows the log of deliveries: each event is handed on once, oldest first, with its bytes and
    fresh signatures, and once more when somebody replays it.
    """
    from conveyor.client.listen import listen

    return run_client(
        lambda target, terminal: listen(target, terminal, url, job=job, since=since), **common
    )
