"""The banner of a development server: at most ten lines, one JSON line, or nothing."""

from __future__ import annotations

import os
import re
import select
import shlex
import shutil
import sys
import sysconfig
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

from conveyor.domain.urls import without_secrets

if TYPE_CHECKING:
    from conveyor.roles.dev import ServerInfo
    from conveyor.settings import Settings

_MOVES = {
    "system": "",
    "manual": "; its clock stands until POST /_dev/clock, with the token of --json, moves it",
    "auto": "; its clock moves to what is due while a client waits",
}
RESERVED = "example.com, .test …"
_ENDINGS = ("com", "net", "org")
_USUAL_API = "http://127.0.0.1:9000/v1"
LOOPBACK = re.compile(r"localhost|::1|127(\.\d{1,3}){3}")


def banner(info: ServerInfo, settings: Settings) -> list[str]:
    """Return at most ten labelled lines; they tell each rule that is looser than in production."""
    is_local = LOOPBACK.fullmatch(settings.host) is not None
    private = "local" if is_local else "THE NETWORK"
    asks = "" if is_local else " (asks for a key: any; from elsewhere over https)"
    found = path_line(sysconfig.get_path("scripts"))
    fetched = "; private addresses are fetched" if settings.allow_private else ""
    lines = [
        ("API", info.api),
        *([("pages", f"{info.pages}{asks}")] if info.pages else []),
        ("data", f"{os.path.abspath(info.data_dir)} (kept){_MOVES[info.clock]}"),
        ("gateway", _gateway(info.gateway) + (f"; {info.recording}" if info.recording else "")),
        ("client", f"export ZENROWS_BATCH_BASE_URL={info.api}"),
        *([("command", f"{found}  # finds conveyor")] if found else []),
        *([("inbox", f"{info.inbox}/HOST, for {RESERVED}")] if info.inbox else []),
        ("relaxed", f"any API key is accepted, on {settings.host} ({private})"),
        ("relaxed", f"events may go to loopback and over http{fetched}"),
    ]
    if info.slots:
        lines.append(("slots", info.slots))
    return [f"{label:<9}{text}" for label, text in lines]


def lines_to_try(info: ServerInfo) -> list[str]:
    """Return two commands for a first job: one submits up to three pages, one follows it. None for
    a replay that has no page to offer."""
    import msgspec

    pages = [f"https://example.{name}/" for name in _ENDINGS]
    if info.gateway == "fake":
        pages = [f"http://fake.test/{name}" for name in "abc"]
    if info.gateway == "replay":
        pages = list(info.samples)
    if not pages:
        return []
    body = shlex.quote(msgspec.json.encode({"tasks": [{"url": page} for page in pages]}).decode())
    server = "" if info.api == _USUAL_API else f" --server {info.api}"
    return [
        f"try      curl -H 'X-API-Key: local' -H 'Content-Type: application/json' -d {body} "
        f"{info.api}/jobs",
        f"then     conveyor watch last{server}",
    ]


def path_line(scripts: str) -> str | None:
    """Return the line for a shell that finds `conveyor` in this directory of programs.

    None if a shell finds it already, or if it is not there.
    """
    program = os.path.join(scripts, "conveyor")
    found = shutil.which("conveyor")
    if not os.path.exists(program) or (found is not None and os.path.samefile(found, program)):
        return None
    return f'export PATH={shlex.quote(scripts)}:"$PATH"'


def json_line(info: ServerInfo) -> str:
    """Return the banner for programs: api, pid, data_dir, gateway, and pages,
    inbox, clock and dev_token if there are any."""
    import msgspec

    document = {
        "api": info.api,
        "pid": info.pid,
        "data_dir": os.path.abspath(info.data_dir),
        "gateway": without_secrets(info.gateway),
        **({"pages": info.pages} if info.pages else {}),
        **({"inbox": info.inbox} if info.inbox else {}),
        **({"clock": info.clock, "dev_token": info.dev_token} if info.dev_token else {}),
    }
    return msgspec.json.encode(document).decode()


def _gateway(gateway: str) -> str:
    return {
        "direct": "direct: this server fetches the pages itself, without rendering",
        "fake": "fake: made-up answers, no network",
        "replay": "replay: no network",
    }.get(gateway, without_secrets(gateway))


class BannerPrinter:
    """Prints the start and the end of a server, in the requested form: `as_json` for programs."""

    def __init__(self, *, quiet: bool = False, as_json: bool = False) -> None:
        self._quiet = quiet
        self.as_json = as_json
        self._is_stopping = False

    @property
    def stream(self) -> TextIO | None:
        """Return the stream for readable lines: not the one of the JSON line, and none if quiet."""
        if self._quiet:
            return None
        return sys.stderr if self.as_json else sys.stdout

    def ready(self, info: ServerInfo, settings: Settings, *, note: str | None = None) -> None:
        """Print the note, then the banner of a server that answers now.

        Prints nothing for a server that was stopped while it started.
        """
        if self._is_stopping:
            return
        if note is not None:
            self.say(note)
        if self.as_json:
            _write(sys.stdout, json_line(info))
        else:
            for line in banner(info, settings):
                self.say(line)

    def try_out(self, info: ServerInfo, *, has_keys: bool) -> None:
        """Print what to try first, and that keys are taken."""
        if self.as_json or self._is_stopping:
            return
        for line in lines_to_try(info):
            self.say(line)
        if has_keys:
            self.say("keys     ? lists them, q quits")

    def stopping(self) -> None:
        """Print that the server is stopping."""
        self._is_stopping = True
        self.say("stopping")

    def say(self, line: str) -> None:
        """Print one readable line, unless nobody reads and the output is full: a line must not keep
        a server from ending."""
        if self.stream is not None and _takes_more(self.stream):
            _write(self.stream, line)


def _takes_more(stream: TextIO) -> bool:
    try:
        return bool(select.select([], [stream], [], 0)[1])
    except (OSError, ValueError):
        # Not a file of the system's, or a closed one.
        return True


def _write(stream: TextIO, line: str) -> None:
    # A closed output is no reason to end a server.
    with suppress(OSError, ValueError):
        # One write, so that lines of two threads do not mix.
        stream.write(f"{line}\n")
        stream.flush()
