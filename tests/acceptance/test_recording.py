"""A site that is recorded through the direct gateway, and replayed when it is gone."""

from __future__ import annotations

import gzip
import html
import json
import random
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

from tests.acceptance.support_boot import boot
from tests.acceptance.support_cli import dev
from tests.acceptance.support_site import in_background
from tests.acceptance.support_wire import Wire
from tests.disk import files_below

DIRECT = ("--gateway", "direct", "--allow-private")
PAGES, TOLD, BUSY = 270, 30, 100
SECRETS = [f"{random.Random(number).randbytes(9).hex()}-s{number}" for number in range(40)]
ENCODINGS: list[Callable[[str], str]] = [
    str,
    lambda text: quote(text, safe=""),
    lambda text: "".join(f"%{byte:02X}" for byte in text.encode()),
    lambda text: b64encode(text.encode()).decode(),
    lambda text: text.encode().hex(),
    lambda text: "".join(f"\\u{ord(character):04x}" for character in text),
    lambda text: "".join(f"&#{ord(character)};" for character in text),
    lambda text: html.escape(json.dumps(text)),
]


class EchoSite(ThreadingHTTPServer):
    """A site of pages and failures by their paths; below /told it tells its visitors all that it
    knows of them."""

    request_queue_size = 256
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.authority = f"127.0.0.1:{self.server_port}"
        self._visits: Counter[str] = Counter()
        self._lock = Lock()

    def visit(self, path: str) -> int:
        """Count a visit; the number of those before."""
        with self._lock:
            self._visits[path] += 1
            return self._visits[path] - 1


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: EchoSite

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        kind = parts.path.split("/")[1]
        body = f"<p>{parts.path}, seen {self.server.visit(parts.path)} times</p>".encode()
        answers = {
            "gone": (404, b"", {}),
            "shut": (403, b"", {}),
            "moved": (302, b"", {"Location": f"/page{parts.path}"}),
            "large": (200, body * 12_000, {"Content-Type": "application/pdf"}),
            "packed": (200, gzip.compress(body), {"Content-Encoding": "gzip"}),
        }
        status, sent, fields = answers.get(kind, (200, body, {}))
        if kind == "flaky" and b"seen 0 " in body:
            status, fields = 503, {"Retry-After": "0"}
        if kind == "busy" and b"seen 0 " in body:
            status, fields = 429, {"Retry-After": "1"}
        if kind == "told":
            sent = self._told(int(parts.path.split("/")[2]))
        if kind == "told" and parts.path.endswith("/0"):
            fields, sent = {"Set-Cookie": self.headers["Cookie"]}, b"<p>welcome</p>"
        self.send_response(status)
        for name, value in fields.items():
            self.send_header(name, value)
        if "Content-Type" not in fields:
            self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(sent) + (9 if kind == "cut" else 0)))
        self.end_headers()
        self.wfile.write(sent)
        self.close_connection = kind == "cut"

    def _told(self, number: int) -> bytes:
        known = "\n".join(
            [self.path, *(f"{name}: {value}" for name, value in self.headers.items())]
        )
        return f"<pre>{ENCODINGS[number % len(ENCODINGS)](known)}</pre>".encode()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextmanager
def echo_site() -> Iterator[EchoSite]:
    with EchoSite() as server, in_background(server):
        yield server


KINDS = ("page", "page", "gone", "flaky", "shut", "moved", "large", "packed", "cut", "page")


def path_of(number: int) -> str:
    """The path of a task; one of them makes the site ask for a pause."""
    kind = "busy" if number == BUSY else KINDS[number % len(KINDS)]
    return f"/{kind}/{number}"


def secret_task(site: EchoSite, path: str, number: int) -> dict[str, Any]:
    """A task whose URL and headers hold four of the secrets."""
    chosen = random.Random(number)
    user, password, key, token, cookie, header = (chosen.choice(SECRETS[1:]) for _ in range(6))
    if number < len(SECRETS) - 1:  # so that each is sent once
        key = SECRETS[number + 1]
    headers = {
        "Authorization": f"Bearer {token}" if number % 2 else f"Basic {_basic(user, password)}",
        "Cookie": f"theme=dark; session={cookie}",
        "X-Partner": header,
    }
    return {
        "url": f"http://{user}:{password}@{site.authority}{path}?page={number}&api_key={key}",
        "zenrows_params": {"custom_headers": headers},
    }


def _basic(user: str, password: str) -> str:
    return b64encode(f"{user}:{password}".encode()).decode()


def seen(api: str, jobs: list[list[dict[str, Any]]]) -> list[Any]:
    """The results of the runs of some jobs: stats, and of each task its row, history and body."""
    found: list[Any] = []
    with Wire(api, caller=SECRETS[0]) as wire:
        made = [wire.ask("POST", "/jobs", body={"tasks": tasks})["job_id"] for tasks in jobs]
        for job_id in made:
            run = wire.ended(job_id)
            tasks = [_task(wire, job_id, row) for row in wire.rows(job_id)]
            found.append({"stats": run["stats"], "tasks": tasks})
    return found


def _task(wire: Wire, job_id: str, row: Any) -> Any:
    task_id = row["task_id"]
    content = wire.send("GET", f"/jobs/{job_id}/tasks/{task_id}/content")
    events = wire.history(job_id, task_id)
    return (
        row["url"],
        row["status"],
        row.get("error"),
        content.status_code,
        content.headers["Content-Type"],
        content.content if row["status"] == "successful" else b"",
        [(event["kind"], event["attempt"], event.get("error")) for event in events],
    )


def traces(directory: Path) -> list[tuple[str, str]]:
    """The secrets that stand in a directory, by their encodings."""
    names = b"\n".join(str(path).encode() for path in files_below(directory))
    text = names + b"".join(path.read_bytes() for path in files_below(directory))
    lowered = text.lower()
    return [
        (secret, spelt)
        for secret in SECRETS
        for encode in ENCODINGS
        for spelt in {encode(secret), encode(secret).strip("=")}
        if spelt.encode() in text or spelt.lower().encode() in lowered
    ]


@pytest.mark.slow
@pytest.mark.extended
def test_three_hundred_pages_are_replayed_without_the_site_and_hold_no_secret(
    tmp_path: Path,
) -> None:
    kept = tmp_path / "recording"
    settings = {"retry_base": 0.01, "retry_cap": 0.02}
    with echo_site() as site:
        jobs = [
            [secret_task(site, path_of(number), number) for number in range(PAGES)],
            [secret_task(site, f"/told/{number}", number) for number in range(TOLD)],
        ]
        with boot(tmp_path / "one", *DIRECT, "--record", str(kept), **settings) as server:
            recorded, told = seen(server.api, jobs)
        assert recorded["stats"]["failed"] == 27 * 3
        assert told["stats"]["successful"] == TOLD
        assert "not recorded: 30 answers" in server.output().decode()
        assert site.authority in server.output().decode()
    stored = {secret for secret, _ in traces(tmp_path / "one" / "data" / "blobs")}
    assert len(stored) > TOLD  # the server that recorded did get them
    assert traces(kept) == []
    for name in ("two", "three"):
        with boot(tmp_path / name, "--replay", str(kept), **settings) as server:
            replayed, withheld = seen(server.api, jobs)
        assert replayed == recorded
        codes = Counter(task[2]["code"] for task in withheld["tasks"])
        assert codes == {"secret_in_answer": TOLD}


@pytest.mark.slow
@pytest.mark.extended
def test_what_is_not_recorded_fails_and_says_what_differs(tmp_path: Path) -> None:
    kept = tmp_path / "recording"
    with echo_site() as site:
        urls = [f"http://{site.authority}/page/{number}?size=1" for number in range(3)]
        with boot(tmp_path / "one", *DIRECT, "--record", str(kept)) as server:
            recorded = seen(server.api, [[{"url": url} for url in urls]])
        other = f"http://{site.authority}/page/1?size=2"
        with boot(tmp_path / "two", *DIRECT, "--replay", str(kept)) as server:
            (missed,) = seen(server.api, [[{"url": other}]])
        flags = (*DIRECT, "--replay", str(kept), "--missing", "record")
        with boot(tmp_path / "three", *flags) as server:
            added = seen(server.api, [[{"url": url} for url in urls], [{"url": other}]])
    error = missed["tasks"][0][2]
    assert (error["code"], error["detail"]) == (
        "not_recorded",
        f"differs from GET {urls[1]} in: query size",
    )
    with boot(tmp_path / "four", "--replay", str(kept)) as server:
        assert seen(server.api, [[{"url": url} for url in urls], [{"url": other}]]) == added
    assert added[0] == recorded[0]


@pytest.mark.slow
def test_recordings_that_do_not_fit_keep_a_server_from_starting_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "r" / "bodies").mkdir(parents=True)
    (tmp_path / "r" / "exchanges.jsonl").write_text('{"form":9}\n')
    data = tmp_path / "data"
    for flags, code, said in (
        (("--record", str(tmp_path / "r")), 1, "holds a recording already"),
        (("--replay", str(tmp_path / "r")), 1, "is of form 9"),
        (("--replay", str(tmp_path / "none")), 1, "holds no recording"),
        (("--missing", "pass"), 2, "--missing is about what --replay does not have"),
        (("--record", "a", "--replay", "b"), 2, "exclude each other"),
        (("--demo", "--replay", str(tmp_path / "r")), 2, "--demo takes no --clock, --record"),
    ):
        ran = dev(data, "--port", "0", *flags)
        assert ran.code == code, ran.err
        assert said in ran.err[-1]
        assert len(ran.err) == 1 or code == 2


@pytest.mark.slow
@pytest.mark.extended
def test_a_recording_fits_a_clock_that_moves_by_itself(tmp_path: Path) -> None:
    kept = tmp_path / "recording"
    urls = ["http://fake.test/a", "http://fake.test/b?flaky=2", "http://fake.test/c?status=404"]
    jobs = [[{"url": f"{url}"} for url in urls]]
    with boot(tmp_path / "one", "--gateway", "fake", "--record", str(kept)) as server:
        recorded = seen(server.api, jobs)
    with boot(tmp_path / "two", "--clock", "auto", "--replay", str(kept)) as server:
        assert seen(server.api, jobs) == recorded
    more = tmp_path / "more"
    flags = ("--gateway", "fake", "--clock", "auto", "--record", str(more))
    with boot(tmp_path / "three", *flags, retry_base=600) as server:
        assert seen(server.api, jobs) == recorded
    assert len((more / "exchanges.jsonl").read_text().splitlines()) == 2 + 5
