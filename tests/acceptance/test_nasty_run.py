"""`conveyor run` over the nasty origin: the command, a process of its own, over real sockets.

Every answer is followed by a page of its own, so that bytes of one that reach another show.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conveyor.gateway.problems import transport_failure
from tests.acceptance.support_boot import boot
from tests.acceptance.support_calls import Caller
from tests.acceptance.support_cli import CLIENT
from tests.acceptance.support_wire import eventually
from tests.nasty.answer import Nasty
from tests.nasty.certificate import Certificate
from tests.nasty.codings import LIMIT
from tests.nasty.corpus import ANSWERS
from tests.nasty.origin import NastyOrigin, page, page_body

pytestmark = [pytest.mark.server, pytest.mark.slow]

SECONDS = 100.0
LATE_SECONDS = 2.0
LARGE = "x" * 16_000
"""As much as a task may carry, so that an answer can come before all of it was read."""
HELD = Nasty(name="held", wire=b"", late=page(0))
"""A page that waits until the test lets it go."""
Json = dict[str, Any]


class Asked(msgspec.Struct, frozen=True):
    """A task: its external id, where it goes, and the content or the code of the problem that is
    right."""

    name: str
    task: Json
    right: bytes | str


class Origins:
    """The nasty origin without TLS and with it, and one whose pages wait for the test."""

    def __init__(self, plain: NastyOrigin, tls: NastyOrigin, holding: NastyOrigin) -> None:
        self.plain, self.tls, self.holding = plain, tls, holding
        self._numbers = iter(range(1, 1_000_000))
        self._places = {name: place for place, name in enumerate(ANSWERS)}

    @property
    def requests(self) -> int:
        return sum(len(each.served) for each in (self.plain, self.tls, self.holding))

    def of(self, name: str) -> NastyOrigin:
        return self.tls if ANSWERS[name].is_tls else self.plain

    def nasty(self, name: str) -> tuple[int, Asked]:
        """Return a task for an answer, and its number."""
        answer, number = ANSWERS[name], next(self._numbers)
        task: Json = {
            "url": f"{self.of(name).url}/nasty-{self._places[name]}-{number}",
            "zenrows_params": {"allowed_status_codes": str(answer.status)},
        }
        if answer.method == "POST":
            task |= {"method": "POST", "body": LARGE}
        return number, Asked(f"n{number}", task, right_content(answer))

    def page(self, origin: NastyOrigin) -> Asked:
        """Return a task for a page of its own."""
        number = next(self._numbers)
        return Asked(f"p{number}", {"url": f"{origin.url}/page-{number}"}, page_body(number))

    def held(self) -> tuple[int, Asked]:
        """Return a task for a page that waits, and its number."""
        number = next(self._numbers)
        task = {"url": f"{self.holding.url}/nasty-0-{number}"}
        return number, Asked(f"h{number}", task, page_body(0))


def right_content(answer: Nasty) -> bytes | str:
    if answer.content is not None:
        return answer.content
    if answer.trouble is not None:
        return transport_failure(answer.trouble).problem.code
    return answer.body


@contextmanager
def served(certificate: Certificate) -> Iterator[Origins]:
    answers = list(ANSWERS.values())
    with (
        NastyOrigin(answers) as plain,
        NastyOrigin(answers, context=certificate.server_context()) as tls,
        NastyOrigin([HELD]) as holding,
    ):
        yield Origins(plain, tls, holding)


@contextmanager
def running(
    directory: Path, authority: Path, asked: Sequence[Asked], *flags: str, timeout: float = 60.0
) -> Iterator[subprocess.Popen[bytes]]:
    """Run the command over tasks; it has to end with the block."""
    lines = [json.dumps(each.task | {"external_id": each.name}) for each in asked]
    (directory / "tasks.jsonl").write_text("\n".join(lines))
    command = [*CLIENT, "run", str(directory / "tasks.jsonl"), "-o", str(directory / "out")]
    command += ["--allow-private", "--data-dir", str(directory / "data"), "--max-attempts", "1"]
    variables = {
        "SSL_CERT_FILE": str(authority),
        "CONVEYOR_GATEWAY_TIMEOUT": str(timeout),
        "CONVEYOR_MAX_RESULT_BYTES": str(LIMIT),
    }
    with (directory / "output").open("wb") as output:
        program = subprocess.Popen(
            [*command, *flags],
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        yield program
        assert program.wait(SECONDS) == 3, (directory / "output").read_text()
    finally:
        if program.poll() is None:
            program.kill()
            program.wait()


def wait_for(origin: NastyOrigin, requests: int) -> None:
    """Wait until so many requests have arrived."""
    eventually(
        lambda: True if len(origin.served) >= requests else None,
        f"request {requests} arrives",
        timeout=SECONDS,
    )


def check(directory: Path, asked: Sequence[Asked], requests: int) -> None:
    """Hold the files, the rows and the histories against what is right."""
    files = {path.name.partition(".")[0]: path for path in (directory / "out").iterdir()}
    sent = 0
    with boot(directory, "--gateway", "fake") as server, Caller(server.api, "local") as caller:
        [job] = caller.get("/jobs")["jobs"]
        rows = {row["external_id"]: row for row in caller.results(job, limit=1_000)}
        assert rows.keys() == {each.name for each in asked}
        for each in asked:
            row = rows[each.name] | {"job_id": job["job_id"]}
            if isinstance(each.right, bytes):
                assert row["status"] == "successful", (each, row)
                assert is_same(files[each.name].read_bytes(), each.right), each.task
            else:
                assert each.name not in files, each
                assert row["error"]["code"] == each.right, (each, row)
            sent += sum(event.get("sent", 1) for event in caller.history(row))
    assert sent == requests


def is_same(given: bytes, right: bytes) -> bool:
    """Compare bodies. pytest would take minutes to describe how two large ones differ."""
    return given == right


def test_the_command_gets_what_is_its_own(tmp_path: Path) -> None:
    certificate = Certificate(tmp_path)
    with served(certificate) as origins:
        asked = []
        for name, answer in ANSWERS.items():
            if not (answer.pushed or answer.late or answer.method == "HEAD"):
                asked += [origins.nasty(name)[1], origins.page(origins.of(name))]
        with running(tmp_path, certificate.authority, asked, "--workers", "8"):
            pass
        check(tmp_path, asked, origins.requests)


@pytest.mark.extended
def test_the_command_gets_nothing_that_came_unasked_or_too_late(tmp_path: Path) -> None:
    """One call at a time: the origin pushes while a page of another origin is waited for."""
    certificate = Certificate(tmp_path)
    with served(certificate) as origins:
        asked, pushes = [], []
        for name, answer in ANSWERS.items():
            if answer.pushed or answer.late:
                (number, nasty), (held, meanwhile) = origins.nasty(name), origins.held()
                asked += [nasty, meanwhile, origins.page(origins.of(name))]
                pushes.append((origins.of(name), number, held))
        one = ("--workers", "1", "--max-inflight", "1")
        with running(tmp_path, certificate.authority, asked, *one, timeout=LATE_SECONDS):
            for count, (origin, number, held) in enumerate(pushes, 1):
                # The caller has the answer, or has given up, once it asks for the page that waits.
                wait_for(origins.holding, count)
                origin.go_on(number)
                origins.holding.go_on(held)
        check(tmp_path, asked, origins.requests)
