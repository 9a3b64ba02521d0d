"""Logs on standard error: one line a record, as text or as JSON, with the record's extra fields."""

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
"""Seconds for which a line is not said again; they double each time that it is."""
FORGOTTEN_AFTER = 300.0
MOST_TOLD = 1_000
"""Lines that are remembered."""


class Repeats(logging.Filter):
    """Lets a warning or error that says the same again pass ever more seldom, and say how often it
    was said meanwhile; with a traceback it is the same if that ends at the same place by the same
    kind of exception. What has fields of its own always passes."""

    def __init__(self) -> None:
        super().__init__()
        self._told: dict[_Said, _Told] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record passes; a count is added to it where lines were left out."""
        if record.levelno < logging.WARNING or _fields(record):
            return True
        text = record.getMessage()
        said = (record.name, text, _end(record))
        told = self._told.get(said)
        if told is None or record.created - told.at >= FORGOTTEN_AFTER:
            if len(self._told) >= MOST_TOLD:
                self._told.clear()
            self._told[said] = _Told(record.created)
            return True
        if record.created < told.at + PAUSES.delay(told.passed):
            told.left_out += 1
            return False
        if told.left_out:
            record.msg, record.args = f"{text} (and {told.left_out} times before)", ()
        told.at, told.left_out = record.created, 0
        told.passed += 1
        return True


_End = tuple[type[BaseException] | None, str, int]
_Said = tuple[str, str, _End | None]


@dataclass(slots=True)
class _Told:
    at: float
    passed: int = 1
    left_out: int = 0


def _end(record: logging.LogRecord) -> _End | None:
    """What kind of exception a record's traceback is of, and the file and line it comes from."""
    if not record.exc_info:
        return None
    kind, _, traceback = record.exc_info
    if traceback is None:
        return kind, "", 0
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return kind, traceback.tb_frame.f_code.co_filename, traceback.tb_lineno


def start_logs(settings: Settings) -> None:
    """Log as the settings say; what of the environment sets nothing is told first."""
    configure_logs(level=settings.log_level, form=settings.log_format)
    unknown = unknown_variables()
    if unknown:
        _log.warning("no setting is called %s", ", ".join(unknown))


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
    """`time level logger message key=value …`, control characters escaped."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line; a traceback follows on lines of its own."""
        fields = " ".join(f"{name}={value}" for name, value in _fields(record).items())
        text = f"{record.getMessage()} {fields}".rstrip()
        line = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
        head = f"{_instant(record)} {record.levelname.lower()} {record.name}"
        if record.exc_info:
            line = f"{line}\n{self.formatException(record.exc_info)}"
        return f"{head} {line}"


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and the extra fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line, a traceback inside it."""
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
