"""Every row of SPEC.md's tables of verdicts, run against the gateways."""

from __future__ import annotations

import asyncio
import datetime
import gzip
import json
import resource
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from pathlib import Path
from urllib.parse import parse_qs, quote, urlsplit

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from conveyor.gateway.direct import DirectGateway
from conveyor.gateway.fake import FakeGateway
from conveyor.gateway.http import HttpGateway
from conveyor.gateway.http_client import client_opener
from conveyor.gateway.refusals import redactor, refusal
from conveyor.ports.gateway import Gateway, ScrapeFailed, ScrapeRequest
from conveyor.testing.clock import FakeClock
from conveyor.wire.options import ClientOptions
from tests.unit.spec_document import Row, names, table
from tests.unit.verdict_rows import ANY, conditions, row_of
from tests.unit.wire_server import Peer, RawServer, answer, raw_server

WITH_A_CODE = ("Verdict", "Reason in the roll-up", "Code of the problem")
BROKEN = table("What happened", *WITH_A_CODE)
DIRECT = table("Answer", *WITH_A_CODE)
HTTP = [row for row in table("Answer", "Verdict", "Reason in the roll-up") if len(row) == 3]
CODES = ["", "OTHER9"] + sorted(
    {word.replace("…", "123") for row in HTTP for word in [*names(row[0]), *names(row[1])]}
)
CHARGED = "X-Request-Cost: 1\r\n"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def told(failed: ScrapeFailed) -> list[str]:
    """A verdict in the words of the tables with a code."""
    verdict = "retry" if failed.retryable else "fail"
    assert failed.burns_attempt
    assert failed.account is None
    return [verdict, f"`{failed.failure.value}`", f"`{failed.problem.code}`"]


async def failure(gateway: Gateway, request: ScrapeRequest) -> ScrapeFailed:
    with pytest.raises(ScrapeFailed) as caught:
        await read(gateway, request)
    return caught.value


async def read(gateway: Gateway, request: ScrapeRequest) -> None:
    async with gateway.scrape(request) as success:
        if not isinstance(success.content, bytes):
            async for _ in success.content:
                pass


# -- no whole answer came --


@dataclass(frozen=True)
class Trouble:
    """The bytes that a server sends before it closes, and the request; None leaves it silent."""

    wire: bytes | None = b""
    tls: bool = False
    listens: bool = True
    has_files: bool = True
    path: str = "/"
    fields: dict[str, object] = field(default_factory=dict)


def ok(*fields: str, body: bytes = b"") -> bytes:
    return "\r\n".join(["HTTP/1.1 200 OK", *fields, "", ""]).encode() + body


UNREACHED = "no connection to an HTTP gateway"
TROUBLES = {
    UNREACHED: Trouble(listens=False),
    "no descriptor or memory of this process for a connection": Trouble(has_files=False),
    "the connection broke": Trouble(b""),
    "a body cut off or reset before its end": Trouble(ok("Content-Length: 50", body=b"half")),
    "over TLS, a body that only the end of the connection ends, without close_notify": Trouble(
        ok("Connection: close", body=b"all?"), tls=True
    ),
    "compression cut off or damaged": Trouble(
        ok("Content-Encoding: gzip", body=gzip.compress(b"page" * 99)[:20])
    ),
    "not HTTP": Trouble(b"SSH-2.0-OpenSSH_9.6\r\n"),
    "no whole answer within the time": Trouble(None, fields={"timeout": 0.05}),
    "decoded body over the limit": Trouble(
        ok("Content-Length: 10", body=b"x" * 10), fields={"max_bytes": 9}
    ),
    "more than 3 content codings": Trouble(ok("Content-Encoding: gzip, br, gzip, br")),
    "a URL that cannot be sent": Trouble(path="/\ud800"),
    "headers that cannot be sent": Trouble(
        fields={"params": {"custom_headers": json.dumps({"a b": "c"})}}
    ),
}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of 127.0.0.1 that is its own authority, with its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(IPv4Address("127.0.0.1"))
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    file = tmp_path_factory.mktemp("tls") / "certificate.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    file.write_bytes(made.public_bytes(serialization.Encoding.PEM) + private)
    return file


@contextmanager
def without_files() -> Iterator[None]:
    """Let this process open no further file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@asynccontextmanager
async def troubled(trouble: Trouble, certificate: Path) -> AsyncIterator[str]:
    """The URL of a server with a trouble."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            if trouble.wire is None:
                await reader.read()
            else:
                writer.write(trouble.wire)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            # Ends TLS without close_notify; what was written goes out first.
            writer.transport.abort()

    context = None
    if trouble.tls:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate)
    listener = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    port = listener.sockets[0].getsockname()[1]
    if not trouble.listens:
        listener.close()
    try:
        yield f"{'https' if trouble.tls else 'http'}://127.0.0.1:{port}"
    finally:
        listener.close()


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        (row, kind)
        for row in BROKEN
        for kind in ("direct", "http")
        if (row[0], kind) != (UNREACHED, "direct")
    ],
    ids=lambda value: value if isinstance(value, str) else value[0][:24],
)
async def test_no_whole_answer(row: Row, kind: str, certificate: Path) -> None:
    trouble = TROUBLES[row[0]]
    open_client = client_opener("wire", ClientOptions(authority=certificate))
    async with troubled(trouble, certificate) as origin:
        gateway: Gateway = (
            DirectGateway(FakeClock(), allow_private=True, open_client=open_client)
            if kind == "direct"
            else HttpGateway(origin, FakeClock(), open_client=open_client)
        )
        request = ScrapeRequest(origin + trouble.path, "key", **trouble.fields)  # type: ignore[arg-type]
        with nullcontext() if trouble.has_files else without_files():
            failed = await failure(gateway, request)
        await gateway.aclose()

    assert told(failed) == row[1:]


def test_every_trouble_has_its_row() -> None:
    assert sorted(TROUBLES) == sorted(row[0] for row in BROKEN)


# -- a target that was fetched directly --


async def scripted(peer: Peer) -> None:
    """Answer each request as the query of its target says: `status`, `fields`."""
    while head := await peer.request():
        target = head.split(" ")[1]
        query = parse_qs(urlsplit(target).query)
        inner = query.get("url")
        if inner:  # the target of an HTTP gateway
            query = parse_qs(urlsplit(inner[0]).query)
        status, fields = query["status"][0], query.get("fields", [""])[0]
        whole = answer(query.get("body", ["page"])[0].encode(), fields=fields)
        await peer.send(whole.replace(b"200 OK", status.encode() + b" Scripted"))


@pytest.fixture
async def server(anyio_backend: str) -> AsyncIterator[RawServer]:
    async with raw_server(scripted) as running:
        yield running


@pytest.fixture
async def direct(anyio_backend: str) -> AsyncIterator[DirectGateway]:
    made = DirectGateway(FakeClock(), allow_private=True)
    yield made
    await made.aclose()


@pytest.fixture
async def http(server: RawServer) -> AsyncIterator[HttpGateway]:
    made = HttpGateway(server.url(), FakeClock())
    yield made
    await made.aclose()


def asking(server: RawServer, status: int, **more: str) -> str:
    return server.url(
        "/?" + "&".join(f"{k}={quote(v)}" for k, v in {"status": str(status), **more}.items())
    )


@pytest.mark.slow
async def test_every_status_of_a_target(server: RawServer, direct: DirectGateway) -> None:
    for status in ANY:
        failed = await failure(direct, ScrapeRequest(asking(server, status), "key"))

        assert told(failed) == row_of(DIRECT, status)[1:], status
        assert failed.problem.status == status


async def _lookup(host: str, port: int) -> list[str]:
    raise socket.gaierror(socket.EAI_NONAME, "no such name")


def _closed() -> int:
    """A port that nobody listens on."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port: int = unused.getsockname()[1]
        return port


NAMELESS = "no address for its name"
UNTRUSTED = "no TLS, a certificate that is not valid, or no HTTP/1.1"
STRANGE: dict[str, Callable[[RawServer], str]] = {
    "more than 10 redirects": lambda server: asking(server, 302, fields="Location: #\r\n"),
    "a redirect that is neither http nor https": lambda server: asking(
        server, 301, fields="Location: ftp://h.test/\r\n"
    ),
    "a name that DNS cannot hold": lambda server: f"http://{'a' * 64}.test/",
    "an address that is not public": lambda server: "http://127.0.0.1/",
    NAMELESS: lambda server: "http://nowhere.test/",
    "no connection: refused, no route, no reply": lambda server: f"http://127.0.0.1:{_closed()}/",
    UNTRUSTED: lambda server: "",
}


@pytest.mark.parametrize("row", [row for row in DIRECT if not conditions(row[0])], ids=str)
async def test_a_target_that_cannot_be_fetched(
    row: Row, server: RawServer, certificate: Path
) -> None:
    is_private = row[0] == "an address that is not public"
    lookup = _lookup if row[0] == NAMELESS else None
    gateway = DirectGateway(FakeClock(), allow_private=not is_private, lookup=lookup)

    async with troubled(Trouble(tls=True), certificate) as untrusted:
        url = untrusted if row[0] == UNTRUSTED else STRANGE[row[0]](server)
        failed = await failure(gateway, ScrapeRequest(url, "key"))

    assert told(failed) == row[1:]
    await gateway.aclose()


def test_every_row_of_a_target_is_run() -> None:
    met = {tuple(row_of(DIRECT, status)) for status in ANY}
    assert met | {tuple(row) for row in DIRECT if row[0] in STRANGE} == set(map(tuple, DIRECT))


# -- a gateway that answers like the published one --


def told_by_a_gateway(failed: ScrapeFailed) -> list[str]:
    if failed.account is not None:
        return [f"end the run: `{failed.account.value}`", "–"]
    verdict = "retry" if failed.retryable else "fail"
    if not failed.burns_attempt:
        verdict += ", no attempt used up, the job slows down"
    return [verdict, f"`{failed.failure.value}`"]


def expected(row: Row, code: str) -> list[str]:
    """The verdict of a row; a row that ends the run names causes, the first without a code."""
    if not row[1].startswith("end the run"):
        return row[1:]
    first, *others = names(row[1])
    return [f"end the run: `{code if code in others else first}`", row[2]]


@pytest.mark.slow
def test_every_status_and_code_of_a_gateway() -> None:
    met = set()
    for status in ANY:
        for code in CODES:
            row = row_of(HTTP, status, code)
            failed = refusal(status, json.dumps({"code": code}).encode(), redact=redactor("key"))

            assert told_by_a_gateway(failed) == expected(row, code), (status, code)
            assert failed.problem.code == (code or (failed.account or failed.failure).value)
            met.add(tuple(row))
    assert met == set(map(tuple, HTTP))


@pytest.mark.slow
async def test_every_status_of_a_gateway(server: RawServer, http: HttpGateway) -> None:
    for status in ANY:
        failed = await failure(http, ScrapeRequest(asking(server, status), "key"))

        assert told_by_a_gateway(failed) == expected(row_of(HTTP, status), ""), status


async def test_the_fake_gateway_answers_like_it() -> None:
    gateway = FakeGateway(FakeClock())
    for status in range(300, 600):
        request = ScrapeRequest(f"http://any.test/?status={status}", "key")
        failed = await failure(gateway, request)
        assert told_by_a_gateway(failed) == expected(row_of(HTTP, status), ""), status


# -- statuses that are asked for --


@pytest.mark.slow
async def test_a_listed_status_is_a_body(server: RawServer, direct: DirectGateway) -> None:
    for status in (*range(200, 204), *ANY):
        params = {"allowed_status_codes": f"999,{status}"} if status >= 300 else {}
        if status == 304:
            continue  # has no body, whatever it announces
        url = asking(server, status, fields="Location: /?status=200\r\n")
        async with direct.scrape(ScrapeRequest(url, "key", params=params)) as success:
            assert (success.content, success.sent) == (b"page", 1), status


async def test_a_redirect_that_is_not_listed_is_followed(
    server: RawServer, direct: DirectGateway
) -> None:
    end = quote("Location: /?status=200&body=end\r\n", safe="")
    there = f"/?status=302&body=two&fields={end}"
    url = asking(server, 301, fields=f"Location: {there}\r\n")
    for listed, body, sent in (("", b"end", 3), ("302", b"two", 2), ("301,302", b"page", 1)):
        request = ScrapeRequest(url, "key", params={"allowed_status_codes": listed})
        async with direct.scrape(request) as success:
            assert (success.content, success.sent) == (body, sent), listed


@pytest.mark.parametrize("status", [302, 404, 600, 999])
async def test_a_listed_status_of_a_gateway_must_be_charged_for(
    server: RawServer, http: HttpGateway, status: int
) -> None:
    params = {"allowed_status_codes": str(status)}
    problem = CHARGED + "Content-Type: application/problem+json\r\n"
    for fields in ("", problem):
        request = ScrapeRequest(asking(server, status, fields=fields), "key", params=params)
        assert (await failure(http, request)).problem.status == status

    charged = ScrapeRequest(asking(server, status, fields=CHARGED), "key", params=params)
    async with http.scrape(charged) as success:
        assert success.content == b"page"


@pytest.mark.parametrize("line", ["099 Early", "000 Zero", "1000 Long", "20 Short", "101 Switch"])
async def test_what_is_no_status(direct: DirectGateway, line: str) -> None:
    async def serve(peer: Peer) -> None:
        await peer.request()
        await peer.send(f"HTTP/1.1 {line}\r\nContent-Length: 0\r\n\r\n".encode())

    async with raw_server(serve) as running:
        failed = await failure(direct, ScrapeRequest(running.url(), "key"))

    assert told(failed) == next(row for row in BROKEN if row[0] == "not HTTP")[1:]
