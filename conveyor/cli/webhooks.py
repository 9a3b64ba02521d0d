"""The commands about events: signing keys, and tests of receivers."""

from __future__ import annotations

from typing import Any

import click

from conveyor.cli.commands import run_client, show_help
from conveyor.client.options import json_option, server_options


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
    """Test receivers of events."""
    show_help(context)


@webhook.command()
@click.argument("url")
@click.option("--sign", "signed", is_flag=True, help="Sign the event with your active key.")
@json_option
@server_options
def test(url: str, signed: bool, **common: Any) -> int:
    """Have the server post a test event to URL; exit code 1 if it does not arrive."""
    from conveyor.client import webhooks

    return run_client(
        lambda target, terminal: webhooks.test_webhook(target, terminal, url, signed=signed),
        **common,
    )
