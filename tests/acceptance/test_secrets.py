"""After a busy session no secret is found in any log, answer, file name or stored byte."""

from __future__ import annotations

import json
import re
import sqlite3
import subprocess
import sys
from base64 import b32encode, b64encode, urlsafe_b64encode
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote, quote_plus

import httpx
import pytest

from tests.acceptance.support_boot import Booted, boot
from tests.acceptance.support_calls import Caller
from tests.acceptance.support_raw import answers_to
from tests.acceptance.support_wire import eventually, target
from tests.disk import files_below
from tests.patient import fetched

KEY = "zr+live/k3y=with&odd%41~characters?#"
HEADER_SECRET = "Bearer h34der+s3cret/for=the&target"
PASSWORD = "p4ssw0rd-of-a-url"


def spellings(secret: str) -> dict[str, bytes]:
    """The ways in which a secret could lie about, by name."""
    raw = secret.encode()
    spelled = {
        "plain": raw,
        "percent": quote(secret, safe="").encode(),
        "percent, slashes kept": quote(secret).encode(),
        "form": quote_plus(secret).encode(),
        "hexadecimal": raw.hex().encode(),
        "base 32": b32encode(raw).rstrip(b"="),
        "reversed": raw[::-1],
        "UTF-16": secret.encode("utf-16-le"),
        "JSON": json.dumps(secret).strip('"').replace("/", "\\/").encode(),
        "repr": repr(raw).encode(),
    }
    for shift in range(3):
        # A secret amid other bytes reads otherwise in base 64, by where it starts.
        for name, encode in (("base 64", b64encode), ("URL-safe base 64", urlsafe_b64encode)):
            inner = encode(b"\0" * shift + raw)[4 if shift else 0 :]
            spelled[f"{name}, shifted by {shift}"] = inner.rstrip(b"=")[:-1]
    return spelled


def found(secret: str, content: bytes) -> list[str]:
    """The spellings of a secret that occur in the content."""
    lowered = content.lower()
    return [name for name, text in spellings(secret).items() if text.lower() in lowered]


@pytest.fixture(scope="module")
def gateway() -> Iterator[str]:
    """A scraping API in a process of its own: its URL."""
    program = [sys.executable, "-m", "conveyor.testing.gateway_server"]
    with subprocess.Popen(program, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        yield json.loads(child.stdout.readline())["url"]
        child.terminate()


@pytest.fixture(scope="module", params=["text", "json"])
def session(
    request: pytest.FixtureRequest, gateway: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Booted, bytes]:
    """A server that has ended after a busy session, and all the answers that it gave."""
    answers: list[bytes] = []
    directory = tmp_path_factory.mktemp("secrets")
    flags = ("--gateway", gateway, "--log-level", "debug")
    with (
        boot(
            directory, *flags, retry_base=0.01, retry_cap=0.02, log_format=request.param
        ) as server,
        kept_caller(server, answers) as caller,
    ):
        work(server, caller)
        refuse(server, caller)
        break_down(server, caller)
    return server, b"\n".join(answers)


@contextmanager
def kept_caller(server: Booted, answers: list[bytes]) -> Iterator[Caller]:
    """A caller whose answers, heads included, are kept."""

    def keep(response: httpx.Response) -> None:
        head = [b"%b: %b" % field for field in response.headers.raw]
        answers.append(b"\n".join([*head, response.read()]))

    with Caller(server.api, KEY) as caller:
        caller.http.event_hooks = {"response": [keep]}
        yield caller


def work(server: Booted, caller: Caller) -> None:
    """Scrapes of every outcome, with every operation on them."""
    with_header = {"zenrows_params": {"custom_headers": {"Authorization": HEADER_SECRET}}}
    rows = caller.scraped(
        target("fine"),
        {"url": target("own"), **with_header},
        {"url": target("post"), "method": "POST", "body": "a=1"},
        target("flaky", flaky=1),
        target("short", short="1"),
        target("broken", encoding="gzip", truncate="1"),
        target("reset", reset="1"),
        target("gone", status=404, detail="it is gone"),
        target("unauthenticated", status=401, code="AUTH002"),
        target("blocked", status=403),
        f"http://user:{PASSWORD}@fake.test/?status=422",
        f"http://user:{PASSWORD}@fake.test/",
        max_attempts=2,
        **with_header,
    )
    job = {"job_id": rows[0]["job_id"]}
    for row in rows:
        caller.content(row)
        caller.history(row)
    for row in caller.results(job):
        if "result_url" in row:
            fetched(row["result_url"])
    caller.get("/jobs")
    for verb in ("stop", "pause", "resume", "rerun", "rerun?status=failed", "close"):
        caller.http.post(f"/jobs/{job['job_id']}/{verb}", headers={"Idempotency-Key": verb})
    caller.wait(job)
    refused = caller.submit(target("refused", account="insufficient_credits", detail="none left"))
    assert caller.wait(refused)["status"] == "failed"
    caller.http.delete(f"/jobs/{refused['job_id']}")


def refuse(server: Booted, caller: Caller) -> None:
    """Requests that are refused, some with the key where it does not belong."""
    http = caller.http
    for headers in (
        {"X-API-Key": ""},
        {"X-API-Key": f"{KEY} {KEY}"},
        {"X-API-Key": KEY * 20},
        {"X-API-Key": "", "Authorization": f"Bearer {KEY}"},
        {"Origin": f"http://{quote(KEY, safe='')}.test"},
        {"X-Request-ID": KEY},
        {"Cookie": f"key={KEY}"},
    ):
        http.get("/jobs", headers=headers)
    http.get("/jobs", params={"apikey": KEY, "cursor": "x"})
    http.get("/nowhere", params={"X-API-Key": KEY})
    http.post("/jobs", content=b"{", headers={"Content-Type": "application/json"})
    http.post("/jobs", json={"tasks": [{"url": f"http://user:{PASSWORD}@[::1/"}, {"url": "x"}]})
    http.post("/jobs", json={"tasks": [{"url": f"ftp://user:{PASSWORD}@host.test/"}]})
    bad_header = {"custom_headers": {"Authorization": HEADER_SECRET, "bad name": "x"}}
    http.post("/jobs", json={"tasks": [{"url": target("x")}], "zenrows_params": bad_header})
    key_line = f"X-API-Key: {KEY}\r\n".encode()
    answers_to(server.port, b"GET /v1/jobs HTTP/1.1\r\n" + key_line + b"bad header\r\n\r\n")


def break_down(server: Booted, caller: Caller) -> None:
    """The results' directory is gone, so that storing breaks; a row cannot be read; and, which
    nobody foresaw, a sealed key is no bytes."""
    results = server.data_dir / "blobs" / "results"
    results.rename(server.data_dir / "aside")
    results.write_bytes(b"")
    job = caller.submit(target("cannot/be/stored"), target("large", size=500_000), max_attempts=1)

    def complains(of: bytes) -> Callable[[], bool | None]:
        return lambda: True if of in server.output() else None

    eventually(complains(b"handler failed"), "the server logs what failed")
    caller.http.get(f"/jobs/{job['job_id']}/results")
    caller.http.post(f"/jobs/{job['job_id']}/stop")
    results.unlink()
    (server.data_dir / "aside").rename(results)
    broken = f"/jobs/{caller.http.post('/jobs', json={'status': 'open'}).json()['job_id']}"
    caller.http.post(f"{broken}/pause")
    caller.http.post(f"{broken}/tasks", json={"tasks": [{"url": target("cannot/be/read")}]})
    with closing(sqlite3.connect(server.data_dir / "conveyor.db", timeout=10)) as database:
        with database:
            database.execute("UPDATE tasks SET spec = '{' WHERE spec LIKE '%cannot/be/read%'")
        caller.http.post(f"{broken}/resume")
        eventually(complains(b"is damaged"), "the server names what is damaged")
        caller.http.post(f"{broken}/stop")
        with database:
            database.execute("UPDATE tasks SET spec = '{}' WHERE spec = '{'")
        keyless = f"/jobs/{caller.http.post('/jobs', json={'status': 'open'}).json()['job_id']}"
        caller.http.post(f"{keyless}/pause")
        caller.http.post(f"{keyless}/tasks", json={"tasks": [{"url": target("cannot/be/called")}]})
        with database:
            database.execute("UPDATE jobs SET sealed_key = 5 WHERE job_id = ?", (keyless[6:],))
        caller.http.post(f"{keyless}/resume")
        eventually(complains(b"Traceback"), "the server logs a traceback")


def test_the_session_was_busy_and_was_logged(session: tuple[Booted, bytes]) -> None:
    server, answers = session
    lines = server.stderr.read_text().splitlines()
    text = "\n".join(lines)
    assert len(lines) > 60
    for status in (200, 201, 202, 400, 401, 403, 404, 409, 422):
        assert re.search(rf'(status":| /\S* ){status}\b', text), status
    assert "Traceback" in text
    assert b"unauthenticated" in answers


def test_no_secret_is_logged(session: tuple[Booted, bytes]) -> None:
    server, _ = session
    for secret in (KEY, HEADER_SECRET, PASSWORD):
        assert found(secret, server.output()) == []


def test_no_answer_tells_the_key(session: tuple[Booted, bytes]) -> None:
    _, answers = session
    assert found(KEY, answers) == []


def test_no_stored_byte_and_no_file_name_tells_the_key(session: tuple[Booted, bytes]) -> None:
    server, _ = session
    paths = list(files_below(server.data_dir))
    assert {"conveyor.db", "calls", "lock", "00000001"} <= {path.name for path in paths}
    for path in paths:
        assert found(KEY, path.read_bytes()) == [], path.name
        assert found(KEY, str(path).encode()) == []


def test_no_column_tells_the_key(session: tuple[Booted, bytes]) -> None:
    server, _ = session
    with closing(sqlite3.connect(server.data_dir / "conveyor.db")) as database:
        tables = database.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall()
        values = [
            value if isinstance(value, bytes) else str(value).encode()
            for (table,) in tables
            for row in database.execute(f'SELECT * FROM "{table}"')
            for value in row
        ]
    assert len(values) > 100
    assert found(KEY, b"\n".join(values)) == []


def test_the_search_finds_what_there_is(tmp_path: Path) -> None:
    for secret in (KEY, HEADER_SECRET, PASSWORD):
        for name, text in spellings(secret).items():
            assert name in found(secret, b"before " + text + b" after")
        for start in range(3):
            amid = b64encode(b"." * start + secret.encode() + b".....")
            assert any(name.startswith("base 64") for name in found(secret, amid))
