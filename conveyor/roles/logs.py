"""Logs on standard error: one line a record, as text or as JSON, with the record's extra fields."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import Any

import msgspec

_PLAIN = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


def configure_logs(*, level: str, form: str) -> None:
    """Send the project's log records to standard error; libraries only from warning on."""
    handler = logging.StreamHandler(sys.stderr)
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
