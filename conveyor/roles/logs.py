"""Logs on standard error: one line a record, as text or JSON, with the record's extra fields."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec

from conveyor.domain.backoff import Backoff
from conveyor.settings import Settings, unknown_variables

_log = logging.getLogger(__name__)

_PLAIN = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}

PAUSES = Backoff(2.0, 60.0)
"""Seconds during which a line is not repeated; they double with each repetition."""
FORGOTTEN_AFTER = 300.0
MOST_LINES = 1_000
"""Number of lines to remember."""


class Repeats(logging.Filter):
    """Rate-limits repeated warnings and errors, and adds the number of suppressed ones to the next.

    Records with a traceback are equal if the same exception class was raised at the same line. A
    record with extra fields always passes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[_Key, _Repeated] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Tell whether to log the record; add the number of suppressed ones to it."""
        if record.levelno < logging.WARNING or _fields(record):
            return True
        text = record.getMessage()
        key = (record.name, text, _end(record))
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


def start_logs(settings: Settings) -> None:
    """Configure the logs by the settings; warn of environment variables that set nothing."""
    configure_logs(level=settings.log_level, form=settings.log_format)
    unknown = unknown_variables()
    if unknown:
        _log.warning("unknown setting %s", ", ".join(unknown))


def configure_logs(*, level: str, form: str) -> None:
    """Send the project's log records to standard error; libraries only from warning on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(Repeats())
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("conveyor").setLevel(level.upper())


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in record.__dict__.items() if name not in _PLAIN}


def _instant(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class TextFormatter(logging.Formatter):
    """Formats `time level logger message key=value …`, control characters escaped."""

    def format(self, record: logging.LogRecord) -> str:
        """Format the record as one line; a traceback follows on its own lines."""
        fields = " ".join(f"{name}={value}" for name, value in _fields(record).items())
        text = f"{record.getMessage()} {fields}".rstrip()
        line = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
        head = f"{_instant(record)} {record.levelname.lower()} {record.name}"
        if record.exc_info:
            line = f"{line}\n{self.formatException(record.exc_info)}"
        return f"{head} {line}"


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
