"""Pages about the programs: settings, commands, params, metrics, log lines."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator

import click

from conveyor import cli
from conveyor.client.program import EXIT_CODES
from conveyor.domain import params
from conveyor.engine.telemetry import COUNTER, METRICS
from conveyor.settings import SETTINGS, Setting, Settings, validators
from conveyor.settings.validators import HOUR, LONG, MOST_DAYS
from reference.markdown import code, page, table
from reference.source import ROOT, log_lines, parsed

EMULATORS = ROOT / "tests" / "conformance" / "emulators.py"


def settings() -> str:
    """Return every setting."""
    defaults = Settings()
    secrets = [setting for setting in SETTINGS if setting.secret]
    return page(
        "Settings",
        "Read from the environment, once, at start. A flag of the command line wins over its "
        "variable. An invalid value ends the program with one line that names the "
        f"variable. Seconds go up to {LONG:,} (a year) and days to {MOST_DAYS:,}, unless a row "
        f"says otherwise; intervals, heartbeats and leases to {HOUR:,}. Unit and meaning read as "
        "one sentence.",
        table(
            ["Variable", "Default", "Unit", "Meaning", "Used by"],
            [
                [
                    code(setting.variable),
                    _default(setting, defaults),
                    setting.unit,
                    setting.help,
                    setting.used_by,
                ]
                for setting in SETTINGS
            ],
        ),
        f"**Secrets** may lie in a file instead: {code(*(one.file_variable for one in secrets))} "
        "name one that holds the value; white space at its end is cut off. Both variables of one "
        "secret are refused, unless one is empty. Credentials of AWS come as boto3 finds them.",
        "**Unknown variables** that begin with `CONVEYOR_` are named in one warning at start, "
        "with the setting that is probably meant. They are not refused.",
        "**The command line** talks to the server that `CONVEYOR_URL` names, else "
        "`ZENROWS_BATCH_BASE_URL`, with the key in `ZENROWS_API_KEY`.",
        "## URLs",
        (validators.__doc__ or "").strip().rpartition("\n\n")[2],
        "`CONVEYOR_REDIS_URL` is one of these:",
        (inspect.getdoc(validators.redis_url) or "").partition("\n\n")[2],
        "## Variables of the tests",
        f"In `{EMULATORS.relative_to(ROOT).as_posix()}`:",
        (ast.get_docstring(parsed(EMULATORS)) or "").partition("\n\n")[2],
    )


def _default(setting: Setting, defaults: Settings) -> str:
    shown = _formatted(getattr(defaults, setting.name))
    if setting.production is None:
        return shown
    return f"{shown}; {_formatted(setting.production)} in production"


def _formatted(value: object) -> str:
    match value:
        case bool():
            return code(str(value).lower())
        case float():
            return code(f"{value:g}" if value < 1_000_000 else int(value))
        case "":
            return "empty"
        case _:
            return code(value)


def scraper_params() -> str:
    """Return every scraper param."""
    return page(
        "Scraper params",
        "Any JSON scalar is taken and stored as its JSON text: true becomes `true`, 5 becomes "
        "`5`. Null, arrays and other objects are refused. The whole is at most "
        f"{params.MAX_BYTES:,} bytes.",
        table(["Param", "Takes"], [[code(name), takes] for name, takes in params.KNOWN.items()]),
    )


# -- the command line --


def commands() -> str:
    """Return the commands of users and servers with their options."""
    return page(
        "Commands",
        "Each command also takes `--help`; `conveyor` and `conveyor-dev` take `-h` too. "
        "[admin-commands.md](admin-commands.md) has `conveyor admin`.",
        *_blocks(admin=False),
        "## Exit codes",
        table(["Exit code", "Meaning"], [[str(one), text] for one, text in EXIT_CODES.items()]),
    )


def admin_commands() -> str:
    """Return `conveyor admin` with its commands and options."""
    return page(
        "Commands of an operator",
        "Each command also takes `--help`. [commands.md](commands.md) has the exit codes.",
        *_blocks(admin=True),
    )


def _blocks(*, admin: bool) -> list[str]:
    blocks = []
    for program, command in (("conveyor", cli.conveyor), ("conveyor-dev", cli.conveyor_dev)):
        top = click.Context(command, info_name=program, **command.context_settings)
        for context in _contexts(command, top):
            if context.command_path.startswith("conveyor admin") is admin:
                blocks += _command_blocks(context)
    return blocks


def _contexts(command: click.Command, context: click.Context) -> Iterator[click.Context]:
    """Yield a command, and all those below it."""
    yield context
    if isinstance(command, click.Group):
        for word, below in command.commands.items():
            yield from _contexts(below, _below(below, word, context))


def _below(command: click.Command, word: str, parent: click.Context) -> click.Context:
    # A command remembers its help option by the settings of the first context that asks for it.
    return click.Context(command, info_name=word, parent=parent, **command.context_settings)


def _command_blocks(context: click.Context) -> list[str]:
    command = context.command
    usage = [context.command_path, *command.collect_usage_pieces(context)]
    records = [
        one.get_help_record(context)
        for one in command.get_params(context)
        if isinstance(one, click.Option) and "--help" not in one.opts
    ]
    options = [[code(flags), text] for flags, text in filter(None, records)]
    return [
        f"## {context.command_path}",
        f"```\n{' '.join(usage)}\n```",
        inspect.cleandoc(command.help or "").replace("\f", ""),
        table(["Option", "Meaning"], options) if options else "",
    ]


# -- operation --


def metrics() -> str:
    """Return every metric."""
    return page(
        "Metrics",
        "`GET /metrics`, in the text format of Prometheus; no key, nothing about jobs or callers. "
        "The roles of production serve it on a port of its own.",
        table(
            ["Metric", "Type", "Labels", "Meaning", "Served by"],
            [
                [
                    code(f"conveyor_{name}{'_total' if one.kind == COUNTER else ''}"),
                    one.kind,
                    "; ".join(
                        f"{code(label)}: {code(*values)}" if values else code(label)
                        for label, values in one.labels.items()
                    ),
                    one.help,
                    one.served_by,
                ]
                for name, one in METRICS.items()
            ],
        ),
    )


def log_events() -> str:
    """Return every log line whose message is a literal in the code."""
    return page(
        "Log lines",
        "On standard error, one record a line: time, level, logger, message, and `name=value` "
        "fields, control characters escaped; with `CONVEYOR_LOG_FORMAT=json` one JSON object. "
        "`%s` stands for the subject of the line. A repeated line without fields "
        "is logged after 2 s, then 4, and so on up to 60, with the number of lines left out.",
        table(
            ["Logger", "Message", "Level", "Fields", "Module"],
            [
                [code(one.logger), one.message, one.level, ", ".join(one.fields), code(one.module)]
                for one in log_lines()
            ],
        ),
    )
