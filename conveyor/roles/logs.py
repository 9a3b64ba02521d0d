"""Logs on standard error: one line a record, as text or JSON, with the record's extra fields."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec

from conveyor.aio.log_output import NEWS, LogOutput
from conveyor.domain.backoff import Backoff
from conveyor.settings import Settings, colour_allowed, unknown_variables

_log = logging.getLogger(__name__)

_PLAIN = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}

PAUSES = Backoff(2.0, 60.0)
"""Seconds during which a line is not repeated; they double with each repetition."""
FORGOTTEN_AFTER = 300.0
MOST_LINES = 1_000
"""Number of lines to remember."""
STANDARD_ERROR = 2
"""The descriptor itself: what else writes to the stream would wait for the thread of the logs."""


class Repeats(logging.Filter):
    """Rate-limits repeated warnings and errors, and adds the number of suppressed ones to the next.

    Records with a traceback are equal if the same exception class was raised at the same line,
    whatever the exception says. A record with extra fields, and one that is NEWS each time, always
    passes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[_Key, _Repeated] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Tell whether to log the record; add the number of suppressed ones to it."""
        if (
            record.levelno < logging.WARNING
            or _fields(record)
            or NEWS.keys() <= vars(record).keys()
        ):
            return True
        text = record.getMessage()
        end = _end(record)
        key = (record.name, text if end is None else _without_error(text, record), end)
        earlier = self._seen.get(key)
        if earlier is None or record.created - earlier.at >= FORGOTTEN_AFTER:
            if len(self._seen) >= MOST_LINES:
                self._seen.clear()
            self._seen[key] = _Repeated(record.created)
            return True
        if record.created < earlier.at + PAUSES.delay(earlier.passed):
            earlier.left_out += 1
            return False
        if earlier.left_out:
            record.msg, record.args = f"{text} (and {earlier.left_out} times before)", ()
        earlier.at, earlier.left_out = record.created, 0
        earlier.passed += 1
        return True


def without_botocore_errors(record: logging.LogRecord) -> bool:
    """Let a record pass; of an error that botocore logs, leave only its class.

    Its text quotes what a program of credentials printed, which may be a secret.
    """
    if record.exc_info and record.name.startswith("botocore."):
        kind = record.exc_info[0]
        record.msg, record.args = f"{record.getMessage()} {kind and kind.__name__}", ()
        record.exc_info = record.exc_text = None
    return True


_End = tuple[type[BaseException] | None, str, int]
_Key = tuple[str, str, _End | None]


@dataclass(slots=True)
class _Repeated:
    at: float
    passed: int = 1
    left_out: int = 0


def _end(record: logging.LogRecord) -> _End | None:
    """Return the exception class of a record's traceback, and the file and line that raised it."""
    if not record.exc_info:
        return None
    kind, _, traceback = record.exc_info
    if traceback is None:
        return kind, "", 0
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return kind, traceback.tb_frame.f_code.co_filename, traceback.tb_lineno


def _without_error(text: str, record: logging.LogRecord) -> str:
    """Return the text of a record without what its exception says, which may count or name."""
    error = record.exc_info[1] if record.exc_info else None
    return text.replace(repr(error), "").replace(str(error) or repr(error), "")


def start_logs(settings: Settings) -> None:
    """Configure the logs by the settings; warn of environment variables that set nothing."""
    configure_logs(level=settings.log_level, form=settings.log_format)
    unknown = unknown_variables()
    if unknown:
        _log.warning("unknown setting %s", ", ".join(unknown))


def configure_logs(*, level: str, form: str, descriptor: int = STANDARD_ERROR) -> None:
    """Send the project's log records to standard error; libraries only from warning on."""
    handler = LogOutput(descriptor)
    handler.addFilter(without_botocore_errors)
    handler.addFilter(Repeats())
    handler.setFormatter(JsonFormatter() if form == "json" else _text_formatter())
    root = logging.getLogger()
    earlier, root.handlers[:] = list(root.handlers), [handler]
    for output in earlier:
        if isinstance(output, LogOutput):
            output.close()
    root.setLevel(logging.WARNING)
    logging.getLogger("conveyor").setLevel(level.upper())


def show_requests() -> None:
    """Log a line for each request and each task that ends, whatever the level of the others."""
    for name in ("conveyor.http", "conveyor.tasks"):
        logging.getLogger(name).setLevel(logging.INFO)


def _text_formatter() -> TextFormatter:
    is_terminal = os.isatty(STANDARD_ERROR)
    return TextFormatter(for_terminal=is_terminal, coloured=is_terminal and colour_allowed())


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return the extra fields that have a value."""
    return {
        name: value
        for name, value in record.__dict__.items()
        if name not in _PLAIN and value is not None
    }


def _instant(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


SHORT = {
    "task ended": {
        "state": "{}",
        "ms": " {} ms",
        "attempt": ", attempt {}",
        "url": ", {}",
        "reason": ": {}",
    },
    "request": {"method": "{}", "path": " {}", "status": " {}", "ms": " {} ms"},
}
"""Messages that come often, and their lines as text: their fields but the ids, which JSON has."""

_GREEN, _YELLOW, _RED, _END_COLOUR = "\x1b[32m", "\x1b[33m", "\x1b[31m", "\x1b[0m"


class TextFormatter(logging.Formatter):
    """Formats `time level logger message key=value …`, control characters escaped, and the messages
    of SHORT as they say.

    A terminal gets the time of the day, and no logger; the level only from warning on.
    """

    def __init__(self, *, for_terminal: bool = False, coloured: bool = False) -> None:
        super().__init__()
        self._for_terminal = for_terminal
        self._coloured = coloured

    def format(self, record: logging.LogRecord) -> str:
        """Format the record as one line; a traceback follows on its own lines."""
        text = _text(record)
        line = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
        if self._coloured:
            line = _coloured(line, record)
        if record.exc_info:
            line = f"{line}\n{self.formatException(record.exc_info)}"
        return f"{self._head(record)} {line}"

    def _head(self, record: logging.LogRecord) -> str:
        instant, level = _instant(record), record.levelname.lower()
        if not self._for_terminal:
            return f"{instant} {level} {record.name}"
        time = instant[11:19]
        return time if record.levelno < logging.WARNING else f"{time} {level}"


def _text(record: logging.LogRecord) -> str:
    message, fields = record.getMessage(), _fields(record)
    short = SHORT.get(message)
    if short is None:
        return f"{message} {' '.join(f'{name}={value}' for name, value in fields.items())}".rstrip()
    return "".join(form.format(fields[name]) for name, form in short.items() if name in fields)


def _coloured(line: str, record: logging.LogRecord) -> str:
    """Colour the line of a warning or error, the end of a task, and the answer to a request."""
    status = getattr(record, "status", 0)
    if record.levelno >= logging.ERROR or (isinstance(status, int) and status >= 500):
        colour = _RED
    elif record.levelno >= logging.WARNING or getattr(record, "state", "") == "failed":
        colour = _YELLOW
    elif getattr(record, "state", "") == "successful":
        colour = _GREEN
    else:
        return line
    word, space, rest = line.partition(" ")
    return f"{colour}{word}{_END_COLOUR}{space}{rest}"


class JsonFormatter(logging.Formatter):
    """Formats one JSON object a line: time, level, logger, message, and the extra fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Format the record as one line, including a traceback."""
        document: dict[str, Any] = {
            "time": _instant(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(document, enc_hook=str).decode()
