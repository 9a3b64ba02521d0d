"""Options shared by several commands, and the values behind them."""

from __future__ import annotations

import codecs
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import click

Command = TypeVar("Command", bound=Callable[..., Any])

FIELDS = ("url", "external_id")


class FileType(StrEnum):
    """Type of a file: CSV, one JSON task a line, or one URL a line. The words are those of the
    wire."""

    CSV = "csv"
    JSONL = "jsonl"
    URLS = "urls"


@dataclass(frozen=True, slots=True)
class CsvOptions:
    """The given options for reading a CSV file; columns by name or by index from 0."""

    url: int | str | None = None
    external_id: int | str | None = None
    delimiter: str | None = None
    quote: str | None = None
    header: bool = False


class Directory(click.Path):
    """A directory. An empty text is refused, since it would mean the current one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path. Fails for an empty text."""
        if not value:
            self.fail("must not be empty", param, ctx)
        return super().convert(value, param, ctx)


def _one_character(
    _context: click.Context, _option: click.Parameter, value: str | None
) -> str | None:
    if value is None:
        return None
    text = "\t" if value == "\\t" else value
    if len(text) != 1:
        raise click.BadParameter(r"must be one character, or \t")
    return text


def _text_encoding(
    _context: click.Context, _option: click.Parameter, value: str | None
) -> str | None:
    if value is None:
        return None
    try:
        "".encode(value)
        return codecs.lookup(value).name
    except (LookupError, ValueError):
        raise click.BadParameter("is no encoding of text") from None


def _finite(_context: click.Context, _option: click.Parameter, value: float | None) -> float | None:
    # JSON has no other numbers: they would be sent as null, which is no limit.
    if value is not None and not math.isfinite(value):
        raise click.BadParameter("must be a number")
    return value


_AGO = re.compile(r"([0-9]{1,6})([smhd])", re.ASCII)
_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


def _moment(_context: click.Context, _option: click.Parameter, value: str | None) -> str | None:
    """Turn `2h`, or a time with its zone, into the RFC 3339 of the wire."""
    if value is None:
        return None
    from conveyor.clock import SystemClock
    from conveyor.domain.text_rules import rfc3339

    ago = _AGO.fullmatch(value)
    if ago is not None:
        passed = int(ago[1]) * _SECONDS[ago[2]] * 1_000
        return rfc3339(max(0, SystemClock().now() - passed))
    try:
        found = datetime.fromisoformat(value)
    except ValueError:
        found = None
    if found is None or found.tzinfo is None:
        raise click.BadParameter("must be like 30m, 2h or 3d, or a time such as 2027-09-01T09:00Z")
    return rfc3339(max(0, round(found.timestamp() * 1_000)))


def moment_option(name: str, text: str) -> Callable[[Command], Command]:
    """Build an option for a moment of the past, which the command gets in RFC 3339."""
    return click.option(name, metavar="2h|TIME", callback=_moment, help=text)


def stacked(*options: Callable[[Any], Any]) -> Callable[[Command], Command]:
    """Combine options into one decorator, in the order of the help."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


api_key_option = click.option(
    "--api-key", metavar="KEY", help="API key for the server [ZENROWS_API_KEY, else local]."
)
server_options = stacked(
    click.option(
        "--server",
        metavar="URL",
        help="Server [CONVEYOR_URL, ZENROWS_BATCH_BASE_URL, else http://127.0.0.1:9000/v1].",
    ),
    api_key_option,
)
json_option = click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print JSON objects, one a line; lines for people go to standard error.",
)

rows_option = click.option(
    "--json", "--jsonl", "as_json", is_flag=True, help="One JSON object a line."
)


def _out_option(*names: str, required: bool, text: str) -> Callable[[Command], Command]:
    """Build the option for a directory of results, with `--force`; both become one `out`."""
    directory = click.option(
        *names,
        type=Directory(path_type=Path, file_okay=False),
        required=required,
        metavar="DIR",
        help=text,
    )
    replaces = click.option(
        "--force", is_flag=True, help="Replace the results of another job, and other files, in DIR."
    )

    def decorate(command: Command) -> Command:
        @wraps(command)
        def joined(*args: Any, out: Path | None, force: bool, **rest: Any) -> Any:
            from conveyor.client.directory import Destination

            if force and out is None:
                raise click.UsageError("--force needs --out")
            return command(*args, out=None if out is None else Destination(out, force), **rest)

        return cast(Command, directory(replaces(joined)))

    return decorate


out_option = _out_option(
    "--out", required=False, text="Write the result bodies into DIR, once the run has ended."
)
own_out_option = _out_option("-o", "--out", required=True, text="Write the result bodies into DIR.")
watch_option = click.option("--watch", is_flag=True, help="Follow the run to its end.")
status_option = click.option(
    "--status",
    type=click.Choice(["all", "successful", "failed", "processing"]),
    help="Only these tasks.",
)
group_option = click.option(
    "--group",
    "groups",
    multiple=True,
    metavar="GROUP",
    help="Only the failed tasks of this group (see failures); may be repeated.",
)
file_options = stacked(
    click.option(
        "--type",
        "file_type",
        type=click.Choice([kind.value for kind in FileType]),
        help="Type of the file [by its name: .csv, .tsv and .xlsx are CSV].",
    ),
    click.option(
        "--field",
        "fields",
        multiple=True,
        metavar="url|external_id=COLUMN",
        help="CSV: number of a column, from 0, or its name in the header.",
    ),
    click.option("--header", is_flag=True, help="CSV: the first row names the columns."),
    click.option(
        "--delimiter", callback=_one_character, metavar="CHAR", help="CSV: separator of fields [,]."
    ),
    click.option(
        "--quote", callback=_one_character, metavar="CHAR", help='CSV: quote around fields ["].'
    ),
    click.option(
        "--encoding",
        callback=_text_encoding,
        metavar="NAME",
        help="Encoding of the list, such as utf-16 or cp1252 [utf-8].",
    ),
    click.option(
        "--scheme",
        type=click.Choice(["https", "http"]),
        help="Put this before bare hosts, such as example.com/a.",
    ),
    click.option(
        "--skip-invalid", is_flag=True, help="Leave out bad tasks, name them, take the others."
    ),
)
task_options = stacked(
    click.option("--param", "params", multiple=True, metavar="K=V", help="Scraper parameter."),
    click.option(
        "--max-inflight", type=int, metavar="N", help="Maximum number of tasks in work at a time."
    ),
    click.option(
        "--max-attempts", type=int, metavar="N", help="Maximum number of attempts at a task."
    ),
    click.option("--per-host", type=int, metavar="N", help="Most calls at a host at a time."),
    click.option(
        "--per-host-rate",
        type=float,
        metavar="R",
        callback=_finite,
        help="Most calls to a host a second, from 0.01.",
    ),
    click.option("--robots", is_flag=True, help="Heed robots.txt of each host."),
)
gateway_options = stacked(
    click.option("--gateway", metavar="direct|fake|URL", help="Gateway that scrapes [direct]."),
    click.option(
        "--allow-private", is_flag=True, default=None, help="Fetch private addresses too."
    ),
    click.option(
        "--workers", type=click.IntRange(1, 10_000), help="Number of gateway calls at a time [50]."
    ),
)


def parameters(pairs: tuple[str, ...]) -> dict[str, str] | None:
    """Parse the values of `--param`; None if there are none."""
    return dict(_pair(pair, "--param") for pair in pairs) or None


def politeness_of(flags: dict[str, Any]) -> dict[str, Any] | None:
    """Take the politeness out of the flags; None if there is none."""
    given = {name: flags.pop(name) for name in ("per_host", "per_host_rate", "robots")}
    return {
        name: value for name, value in given.items() if value is not None and value is not False
    } or None


def csv_options(
    fields: tuple[str, ...], *, header: bool, delimiter: str | None, quote: str | None
) -> CsvOptions:
    """Build the CSV options; a column given by name implies a header."""
    columns: dict[str, int | str] = {}
    for given in fields:
        field, column = _pair(given, "--field")
        if field not in FIELDS:
            raise click.UsageError(f"--field is url or external_id, not {field!r}")
        if not column:
            raise click.UsageError(f"--field {field} needs a column")
        columns[field] = int(column) if _is_index(column) else column
    named = any(isinstance(column, str) for column in columns.values())
    return CsvOptions(
        url=columns.get("url"),
        external_id=columns.get("external_id"),
        delimiter=delimiter,
        quote=quote,
        header=header or named,
    )


def _is_index(column: str) -> bool:
    return column.isascii() and column.isdecimal() and len(column) < 10


def _pair(text: str, option: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise click.UsageError(f"{option} takes KEY=VALUE, not {text!r}")
    return key, value
