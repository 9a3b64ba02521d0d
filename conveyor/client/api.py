"""HTTP client of a server: one method for each operation, problem documents as exceptions, bounded
retries."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, Protocol, TypeVar
from urllib.parse import quote

import anyio
import httpx
import msgspec
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_base,
    retry_if_exception_type,
    retry_if_result,
    stop_after_attempt,
    wait_exponential,
)

from conveyor.client.errors import ClientError, NoStream, ServerRefused, ServerUnreachable
from conveyor.client.output import printable
from conveyor.client.wire import (
    AddReply,
    DeliveriesReply,
    DeliveryHeadersReply,
    DeliveryReply,
    ExportReply,
    FailuresReply,
    FinalizedKeyReply,
    FiresReply,
    HostsReply,
    InputReply,
    JobReply,
    JobScheduleReply,
    JobsReply,
    LoggedDeliveryReply,
    NewKeyReply,
    RawResultsPage,
    ReadinessReply,
    RefusalReply,
    ReplayedReply,
    RerunReply,
    ResultRow,
    RunReply,
    SigningKeysReply,
    SubmitReply,
    UploadReply,
    WebhookReply,
    WebhookTestReply,
)

ATTEMPTS = 4
MAX_WAIT = 30.0
TRANSIENT = frozenset({429, 502, 503, 504})
CONNECT_TIMEOUT = 5.0
CHECK_TIMEOUT = httpx.Timeout(60.0, connect=CONNECT_TIMEOUT)
"""For uploads and for long lists, whose check comes before the answer."""
LONG_BYTES = 256 * 1_024
"""From this size on a server checks a list in a process of its own, which may take long."""
CONNECTIONS = 16

_backoff = wait_exponential(multiplier=0.25)

Reply = TypeVar("Reply")


class ClientClock(Protocol):
    """The part of a clock that the client needs; values are seconds unless they say otherwise."""

    def now(self) -> int:
        """Return milliseconds since the epoch."""
        ...

    def monotonic(self) -> float:
        """Return seconds from an arbitrary origin."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after `seconds`."""
        ...

    def token(self, length: int) -> bytes:
        """Return unpredictable bytes, for idempotency keys."""
        ...


class Patience(NamedTuple):
    """Seconds that a request may stay without an answer: until it is told, and until it is given
    up."""

    tell: float = 5.0
    give_up: float = 30.0


class StreamedRun(NamedTuple):
    """One event of a stream: a run, or None for one that only shows that the server is there."""

    run: RunReply | None
    event_id: str


class ResultRows(NamedTuple):
    """A page of rows, each with its JSON, and the cursor of the next page."""

    rows: list[tuple[ResultRow, bytes]]
    next_cursor: str | None


PATIENCE = Patience()
STREAM_TYPE = "text/event-stream"
STREAM_SILENCE = 20.0
"""Seconds without a byte after which a stream is lost: a server says something each 15."""
LONGEST_LINE = 1_048_576


def web_address(text: str, problem: str) -> httpx.URL:
    """Parse an http or https URL that can be connected to. Raises ClientError: the problem, and the
    text."""
    try:
        url = httpx.URL(text)
        # A label that is empty or too long would be found out when the host is looked up only.
        url.raw_host.decode().encode("idna")
    except (httpx.InvalidURL, UnicodeError):
        url = httpx.URL("")
    port = url.port if url.port is not None else 80
    is_host = bool(url.host) and "%" not in url.host
    if url.scheme not in ("http", "https") or not is_host or not 0 < port <= 65_535:
        shown = printable(text) or "''"
        raise ClientError(f"{problem}: {shown}")
    return url


def base_url(server: str) -> str:
    """Build the `/v1` address of a server given as a URL or as host:port. Raises ClientError."""
    text = server if "://" in server else f"http://{server}"
    url = web_address(text, "not a server address")
    path = url.path.rstrip("/")
    whole = url.copy_with(
        path=path if path.endswith("/v1") else f"{path}/v1", query=None, fragment=None
    )
    return str(whole)


def retrying(
    pace: ClientClock,
    attempts: int,
    retry: retry_base,
    *,
    wait: Callable[[RetryCallState], float] | None = None,
) -> AsyncRetrying:
    """Build the policy that tries a call up to `attempts` times while `retry` selects its outcome.

    The last outcome is returned or raised. Without `wait` the pauses are 0.5 s, 1 s, 2 s and so on.
    """
    return AsyncRetrying(
        sleep=pace.sleep,
        stop=stop_after_attempt(attempts),
        wait=wait or wait_exponential(multiplier=0.5),
        retry=retry,
        retry_error_callback=_last_outcome,
    )


def _last_outcome(state: RetryCallState) -> Any:
    return state.outcome.result() if state.outcome is not None else None


@asynccontextmanager
async def connect(
    server: str,
    api_key: str,
    pace: ClientClock,
    *,
    patience: Patience = PATIENCE,
    on_slow: Callable[[str], None] = lambda _line: None,
) -> AsyncIterator[Api]:
    """Open a client of the server and close its connections at the end.

    `on_slow` gets a line each time the server lets a request wait. Raises ClientError for an
    unusable address or key. Sends nothing yet.
    """
    address = base_url(server)
    if not api_key or not api_key.isascii() or not api_key.isprintable():
        raise ClientError("the API key must be printable ASCII")
    api = Api(address, api_key, pace, patience, on_slow)
    try:
        yield api
    finally:
        await api.aclose()


class Api:
    """The operations of a server.

    Every method raises ServerUnreachable, ServerRefused, or ClientError if the answer does not come
    from a Conveyor server.
    """

    def __init__(
        self,
        address: str,
        api_key: str,
        pace: ClientClock,
        patience: Patience,
        on_slow: Callable[[str], None],
    ) -> None:
        self.address = address
        self.pace = pace
        self._patience = patience
        self._on_slow = on_slow
        self._timeout = httpx.Timeout(patience.give_up, connect=CONNECT_TIMEOUT)
        url = httpx.URL(address)
        # Two programs of one machine need no proxy from the environment between them.
        self._trust_env = not _loopback(url.host)
        self._keyed = httpx.AsyncClient(
            headers={"X-API-Key": api_key, "Accept": "application/json"},
            timeout=self._timeout,
            trust_env=self._trust_env,
            # Loading certificates takes longer than most commands, and plain HTTP needs none.
            verify=url.scheme == "https",
        )
        self._keyless: httpx.AsyncClient | None = None

    async def aclose(self) -> None:
        """Close the connections."""
        await self._keyed.aclose()
        if self._keyless is not None:
            await self._keyless.aclose()

    async def submit(
        self, body: Mapping[str, Any], *, idempotency_key: str
    ) -> tuple[SubmitReply, bool]:
        """Create a job; return the answer, and whether it repeats an earlier one."""
        response = await self._send("POST", "/jobs", body=body, idempotency_key=idempotency_key)
        replayed = response.headers.get("Idempotency-Replayed") == "true"
        return self._decode(response, SubmitReply), replayed

    async def create_input(self, slot: Mapping[str, Any]) -> InputReply:
        """Create a slot for a file of tasks; an unused slot expires by itself."""
        return self._decode(await self._send("POST", "/job_inputs", body=slot), InputReply)

    async def upload(
        self, upload: UploadReply, size: int, content: Callable[[], AsyncIterator[bytes]]
    ) -> None:
        """Send a file of `size` bytes to its slot, without the API key.

        Each call of `content` yields the file from its start.
        """

        def build() -> httpx.Request:
            return self._fetcher().build_request(
                upload.method,
                upload.url,
                content=content(),
                headers={**upload.headers, "Content-Length": str(size)},
                timeout=CHECK_TIMEOUT,
            )

        try:
            await self._exchange(build, self._fetcher(), _upload_refusal, is_long=True)
        except httpx.InvalidURL:
            raise ClientError("the upload link is not a URL") from None

    async def start_export(self, job_id: str, run_id: str, *, form: str) -> ExportReply:
        """Start an export of a run as zip, jsonl, csv or parquet."""
        path = f"{_run_path(job_id, run_id)}/exports"
        return self._decode(await self._send("POST", path, query={"format": form}), ExportReply)

    async def export(self, job_id: str, run_id: str, export_id: str) -> ExportReply:
        """Read an export."""
        path = f"{_run_path(job_id, run_id)}/exports/{_quoted(export_id)}"
        return self._decode(await self._send("GET", path), ExportReply)

    async def add_tasks(
        self, job_id: str, body: Mapping[str, Any], *, idempotency_key: str
    ) -> AddReply:
        """Add tasks to an open job."""
        path = f"/jobs/{_quoted(job_id)}/tasks"
        response = await self._send("POST", path, body=body, idempotency_key=idempotency_key)
        return self._decode(response, AddReply)

    async def jobs(
        self, *, limit: int, status: str | None, cursor: str | None, kind: str | None = None
    ) -> JobsReply:
        """Read one page of jobs, newest first; `limit` is 1 to 100, `kind` regular or scheduled."""
        query = {"limit": str(limit), "status": status, "type": kind, "cursor": cursor}
        return self._decode(await self._send("GET", "/jobs", query=query), JobsReply)

    async def job(self, job_id: str) -> JobReply:
        """Read a job with its latest run."""
        return self._decode(await self._send("GET", f"/jobs/{_quoted(job_id)}"), JobReply)

    async def run(self, job_id: str, run_id: str) -> RunReply:
        """Read a run with its counters."""
        return self._decode(await self._send("GET", _run_path(job_id, run_id)), RunReply)

    async def run_events(
        self, job_id: str, run_id: str, *, last_id: str = ""
    ) -> AsyncGenerator[StreamedRun]:
        """Yield what a server tells of a run as it comes, until the server ends the stream.

        `last_id` is that of the event seen last. Raises NoStream where the server has no stream to
        give, also one that is no Conveyor server; ServerUnreachable for one that is lost.
        """
        headers = {"Accept": STREAM_TYPE} | ({"Last-Event-ID": last_id} if last_id else {})
        url = f"{self.address}{_run_path(job_id, run_id)}/events"
        timeout = httpx.Timeout(STREAM_SILENCE, connect=CONNECT_TIMEOUT)
        try:
            async with self._keyed.stream(
                "GET", url, headers=headers, timeout=timeout, follow_redirects=False
            ) as response:
                if response.status_code in (502, 503, 504):
                    raise ServerUnreachable(f"{printable(self.address)} serves no stream now;")
                media_type = response.headers.get("Content-Type", "").partition(";")[0]
                if response.status_code != 200 or media_type != STREAM_TYPE:
                    raise NoStream(f"{printable(self.address)} serves no stream")
                async for name, data, event_id in _events(response.aiter_bytes()):
                    run = self._parse(data, RunReply) if name == "run" else None
                    yield StreamedRun(run, event_id)
        except httpx.RequestError:
            raise ServerUnreachable(f"lost the connection to {printable(self.address)};") from None

    async def serves_development(self) -> bool:
        """Tell whether the server has its worker in the same process; False where it does not
        say."""
        url = f"{self.address.removesuffix('/v1')}/readyz"
        try:
            response = await self._keyed.get(url, follow_redirects=False)
            return msgspec.json.decode(response.content, type=ReadinessReply).role == "dev"
        except (httpx.RequestError, msgspec.DecodeError):
            # A gateway before the server may pass on /v1 alone.
            return False

    async def change_run(self, job_id: str, verb: str) -> RunReply:
        """Stop, pause or resume the latest run."""
        response = await self._send("POST", f"/jobs/{_quoted(job_id)}/{verb}")
        return self._decode(response, RunReply)

    async def rerun(
        self, job_id: str, *, status: str | None, group: str | None = None, idempotency_key: str
    ) -> RerunReply:
        """Run a job again: all tasks, or those in `status`, or in one failure `group` of a list."""
        path = f"/jobs/{_quoted(job_id)}/rerun"
        query = {"status": status, "group": group}
        response = await self._send("POST", path, query=query, idempotency_key=idempotency_key)
        return self._decode(response, RerunReply)

    async def delete_job(self, job_id: str) -> None:
        """Delete a job with its runs and results."""
        await self._send("DELETE", f"/jobs/{_quoted(job_id)}")

    async def signing_keys(self) -> SigningKeysReply:
        """Read which signing keys there are."""
        return self._decode(await self._send("GET", "/hmac/keys"), SigningKeysReply)

    async def rotate_key(self) -> NewKeyReply:
        """Make a signing key. Sent once: a repetition would make another one."""
        response = await self._send("POST", "/hmac/keys/rotate", repeats=False)
        return self._decode(response, NewKeyReply)

    async def finalize_key(self) -> FinalizedKeyReply:
        """Let the candidate sign."""
        response = await self._send("POST", "/hmac/keys/rotate/finalize", repeats=False)
        return self._decode(response, FinalizedKeyReply)

    async def cancel_rotation(self) -> None:
        """Remove the candidate."""
        await self._send("DELETE", "/hmac/keys/rotate")

    async def test_webhook(self, url: str, *, signed: bool) -> WebhookTestReply:
        """Have the server post a test event to a receiver."""
        body = {"url": url, "signature": signed}
        response = await self._send("POST", "/webhook/test", body=body, repeats=False)
        return self._decode(response, WebhookTestReply)

    async def set_webhook(self, job_id: str, body: Mapping[str, Any]) -> WebhookReply:
        """Give a job a receiver of events."""
        path = f"/jobs/{_quoted(job_id)}/webhook"
        return self._decode(await self._send("PUT", path, body=body), WebhookReply)

    async def remove_webhook(self, job_id: str) -> None:
        """Send no more events of a job."""
        await self._send("DELETE", f"/jobs/{_quoted(job_id)}/webhook")

    async def deliveries(
        self,
        job_id: str | None,
        *,
        limit: int,
        status: str | None = None,
        since: str | None = None,
        cursor: str | None = None,
    ) -> DeliveriesReply:
        """Read one page of the deliveries of a job, or of all, newest first; `limit` is 1 to 100,
        `since` RFC 3339."""
        job = "" if job_id is None else f"/jobs/{_quoted(job_id)}"
        query = {"limit": str(limit), "status": status, "since": since, "cursor": cursor}
        response = await self._send("GET", f"{job}/webhook/deliveries", query=query)
        return self._decode(response, DeliveriesReply)

    async def delivery(self, delivery_id: str) -> LoggedDeliveryReply:
        """Read a delivery with its attempts and its body."""
        response = await self._send("GET", _delivery_path(delivery_id))
        return self._decode(response, LoggedDeliveryReply)

    async def replay_delivery(self, delivery_id: str) -> DeliveryReply:
        """Send an event again. Asked once: a repetition would send it once more."""
        path = f"{_delivery_path(delivery_id)}/replay"
        return self._decode(await self._send("POST", path, repeats=False), DeliveryReply)

    async def replay_deliveries(
        self, body: Mapping[str, Any], *, idempotency_key: str
    ) -> ReplayedReply:
        """Send the events of a window of time again that are in one status."""
        path = "/webhook/deliveries/replay"
        response = await self._send("POST", path, body=body, idempotency_key=idempotency_key)
        return self._decode(response, ReplayedReply)

    async def delivery_headers(self, delivery_id: str) -> dict[str, str]:
        """Have the headers of an event written, and signed at this moment."""
        response = await self._send("POST", f"{_delivery_path(delivery_id)}/headers")
        return self._decode(response, DeliveryHeadersReply).headers

    async def schedule(self, job_id: str) -> JobScheduleReply:
        """Read the schedule of a job, and its next fires."""
        path = f"/jobs/{_quoted(job_id)}/schedule"
        return self._decode(await self._send("GET", path), JobScheduleReply)

    async def fires(self, job_id: str, *, limit: int) -> FiresReply:
        """Read what became of the newest fires of a job."""
        path = f"/jobs/{_quoted(job_id)}/schedule/fires"
        return self._decode(await self._send("GET", path, query={"limit": str(limit)}), FiresReply)

    async def set_schedule(self, job_id: str, body: Mapping[str, Any]) -> JobReply:
        """Replace the schedule of a job."""
        path = f"/jobs/{_quoted(job_id)}/schedule"
        return self._decode(await self._send("PUT", path, body=body), JobReply)

    async def set_schedule_state(self, job_id: str, state: str) -> JobReply:
        """Make a schedule active, or paused."""
        path = f"/jobs/{_quoted(job_id)}/schedule/state"
        response = await self._send("POST", path, body={"schedule_state": state})
        return self._decode(response, JobReply)

    async def failures(self, job_id: str, run_id: str) -> FailuresReply:
        """Read the failed tasks of a run by kind."""
        path = f"{_run_path(job_id, run_id)}/failures"
        return self._decode(await self._send("GET", path), FailuresReply)

    async def hosts(self, job_id: str, run_id: str) -> HostsReply:
        """Read what a run does to each host."""
        path = f"{_run_path(job_id, run_id)}/hosts"
        return self._decode(await self._send("GET", path), HostsReply)

    async def held_hosts(self, job_id: str, run_id: str) -> HostsReply:
        """Read which hosts hold a run back by their limits."""
        path = f"{_run_path(job_id, run_id)}/hosts"
        return self._decode(await self._send("GET", path, query={"held": "1"}), HostsReply)

    async def results(
        self,
        job_id: str,
        *,
        run_id: str | None = None,
        status: str | None = None,
        group: str | None = None,
    ) -> AsyncIterator[tuple[ResultRow, bytes]]:
        """Yield every row of a run (the latest by default) in submission order, with its JSON."""
        cursor = None
        while True:
            page = await self.results_page(
                job_id, run_id, status=status, group=group, cursor=cursor
            )
            for row in page.rows:
                yield row
            if not page.next_cursor:
                return
            cursor = page.next_cursor

    async def results_page(
        self,
        job_id: str,
        run_id: str | None,
        *,
        status: str | None,
        cursor: str | None = None,
        group: str | None = None,
        limit: int = 1_000,
    ) -> ResultRows:
        """Read one page of the rows of a run; without `run_id`, of the latest."""
        path = _run_path(job_id, run_id) if run_id else f"/jobs/{_quoted(job_id)}"
        query = {"status": status, "group": group, "limit": str(limit), "cursor": cursor}
        page = self._decode(await self._send("GET", f"{path}/results", query=query), RawResultsPage)
        rows = [(self._parse(bytes(raw), ResultRow), bytes(raw)) for raw in page.results]
        return ResultRows(rows, page.next_cursor or None)

    @asynccontextmanager
    async def download(self, url: str) -> AsyncIterator[httpx.Response]:
        """Open a body by its signed link for raw streaming, without sending the key.

        Raises ClientError for any status but 200, httpx.TransportError while reading.
        """
        async with self._streamed(url, follow=True) as response:
            yield response

    @asynccontextmanager
    async def download_or_link(self, url: str) -> AsyncIterator[httpx.Response | str]:
        """Open a body by its signed link as `download` does, or get a link to where the server's
        store serves it."""
        async with self._streamed(f"{url}&redirect=1", follow=False) as response:
            yield response if response.status_code == 200 else response.headers.get("Location", "")

    @asynccontextmanager
    async def _streamed(self, url: str, *, follow: bool) -> AsyncIterator[httpx.Response]:
        """Open what a link leads to; without `follow`, that may be an answer 307."""
        try:
            async with self._fetcher().stream("GET", url, follow_redirects=follow) as response:
                if response.status_code != 200 and (follow or response.status_code != 307):
                    raise ClientError(f"the result link answered {response.status_code}")
                yield response
        except httpx.InvalidURL:
            raise ClientError("the result link is not a URL") from None
        except httpx.TransportError as error:
            # The system's message for an unresolved name does not include the name.
            host, reason = httpx.URL(url).netloc.decode("ascii"), str(error) or type(error).__name__
            raise type(error)(f"{host}: {reason}") from None

    def _fetcher(self) -> httpx.AsyncClient:
        if self._keyless is None:
            self._keyless = httpx.AsyncClient(
                headers={"Accept-Encoding": "identity"},
                timeout=self._timeout,
                limits=httpx.Limits(max_connections=CONNECTIONS),
                trust_env=self._trust_env,
                follow_redirects=True,
            )
        return self._keyless

    async def _send(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str | None] | None = None,
        body: Mapping[str, Any] | None = None,
        idempotency_key: str | None = None,
        repeats: bool = True,
    ) -> httpx.Response:
        headers: dict[str, str] = {}
        content = None
        if body is not None:
            headers["Content-Type"] = "application/json"
            content = msgspec.json.encode(body)
        if idempotency_key is not None:
            headers["Idempotency-Key"] = idempotency_key
        params = {name: value for name, value in (query or {}).items() if value is not None}
        is_long = "file_input_id" in (body or {}) or len(content or b"") > LONG_BYTES
        request = self._keyed.build_request(
            method,
            self.address + path,
            params=params,
            content=content,
            headers=headers,
            timeout=CHECK_TIMEOUT if is_long else self._timeout,
        )
        tries = ATTEMPTS if repeats else 1
        return await self._exchange(
            lambda: request, self._keyed, self._refusal, is_long=is_long, tries=tries
        )

    async def _exchange(
        self,
        build: Callable[[], httpx.Request],
        through: httpx.AsyncClient,
        refused: Callable[[httpx.Response], ClientError],
        *,
        is_long: bool,
        tries: int = ATTEMPTS,
    ) -> httpx.Response:
        """Send what `build` returns, retry if that may help, and return the good answer.

        Wait for a long request in silence: its progress is shown elsewhere.
        """
        # Nearly every operation may be repeated: those that create something carry an idempotency
        # key, and an extra slot or export expires by itself.

        async def send() -> httpx.Response:
            return await self._send_once(build(), through, is_long=is_long)

        broken = retry_if_exception_type(httpx.RequestError)
        busy = retry_if_result(lambda response: _transient(response, refused))
        try:
            response: httpx.Response = await retrying(self.pace, tries, broken | busy, wait=_wait)(
                send
            )
        except httpx.RequestError:
            raise ServerUnreachable(f"lost the connection to {printable(self.address)}") from None
        if not response.is_success:
            raise refused(response)
        return response

    async def _send_once(
        self, request: httpx.Request, through: httpx.AsyncClient, *, is_long: bool
    ) -> httpx.Response:
        """Exchange once. Raises httpx.RequestError for a failure that a retry may mend."""
        try:
            if is_long:
                return await through.send(request, follow_redirects=False)
            return await self._send_telling(request, through)
        except (httpx.ConnectError, httpx.ConnectTimeout):
            raise ServerUnreachable(
                f"cannot reach {printable(self.address)}: is conveyor-dev running?"
            ) from None
        except httpx.RequestError as error:
            if _is_no_http(error):
                raise self._stranger() from None
            if isinstance(error, httpx.TimeoutException) and not is_long:
                # Each retry would hang as long again.
                raise ServerUnreachable(
                    f"{printable(self.address)} does not answer: gave up after "
                    f"{self._patience.give_up:g} s"
                ) from None
            raise

    async def _send_telling(
        self, request: httpx.Request, through: httpx.AsyncClient
    ) -> httpx.Response:
        """Exchange once, and tell if the answer takes long."""
        outcome: httpx.Response | Exception
        async with anyio.create_task_group() as group:
            group.start_soon(self._tell_when_slow)
            try:
                outcome = await through.send(request, follow_redirects=False)
            except Exception as error:
                # The group would wrap it; it is raised below.
                outcome = error
            group.cancel_scope.cancel()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def _tell_when_slow(self) -> None:
        with anyio.move_on_after(self._patience.tell):
            await anyio.sleep_forever()
        self._on_slow(
            f"{printable(self.address)} has not answered for {self._patience.tell:g} s; waiting "
            f"up to {self._patience.give_up:g} s"
        )

    def _refusal(self, response: httpx.Response) -> ClientError:
        problem = _problem(response)
        if problem is None:
            # A proxy in front of the server may fail with an answer of its own.
            if response.status_code != 429 and response.status_code < 500:
                return self._stranger()
            title = f"{printable(self.address)} answered without a reason"
            problem = RefusalReply(title=title, code="internal")
        return _refused(response.status_code, problem)

    def _stranger(self) -> ClientError:
        return ClientError(f"{printable(self.address)} is not a Conveyor server")

    def _decode(self, response: httpx.Response, kind: type[Reply]) -> Reply:
        return self._parse(response.content, kind)

    def _parse(self, content: bytes, kind: type[Reply]) -> Reply:
        try:
            return msgspec.json.decode(content, type=kind)
        except (msgspec.DecodeError, RecursionError):
            raise self._stranger() from None


async def _events(pieces: AsyncIterator[bytes]) -> AsyncIterator[tuple[str, bytes, str]]:
    """Yield name, data and id of each event in the bytes of a stream; a comment has no name.

    Raises NoStream for a line without an end.
    """
    name, data, event_id, rest = "", b"", "", b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > LONGEST_LINE:
            raise NoStream("a line of the stream is too long")
        for line in lines:
            field, _, value = line.removesuffix(b"\r").partition(b":")
            value = value.removeprefix(b" ")
            if field == b"event":
                name = value.decode(errors="replace")
            elif field == b"data":
                data = value
            elif field == b"id":
                event_id = value.decode() if value.isdigit() else ""
            elif not line.strip():
                yield name, data, event_id
                name, data = "", b""


def _problem(response: httpx.Response) -> RefusalReply | None:
    try:
        return msgspec.json.decode(response.content, type=RefusalReply)
    except (msgspec.DecodeError, RecursionError):
        return None


def _refused(status: int, problem: RefusalReply) -> ServerRefused:
    sentence = printable(problem.detail or problem.title or problem.code)
    code = "" if sentence.endswith(")") else f" ({status} {printable(problem.code)})"
    return ServerRefused(
        sentence + code,
        code=problem.code,
        status=status,
        invalid_tasks=tuple(problem.invalid_tasks or ()),
    )


def _upload_refusal(response: httpx.Response) -> ClientError:
    """Describe a refused upload: the store behind the link need not be a Conveyor server."""
    status = response.status_code
    title = f"the upload link answered {status}"
    return _refused(status, _problem(response) or RefusalReply(title=title, code="internal"))


def _transient(response: httpx.Response, refused: Callable[[httpx.Response], ClientError]) -> bool:
    if response.status_code not in TRANSIENT:
        return False
    refusal = refused(response)
    # quota_exceeded shares its status with rate_limited, but waiting does not help.
    return isinstance(refusal, ServerRefused) and refusal.code != "quota_exceeded"


def _is_no_http(error: httpx.RequestError) -> bool:
    # A hang-up in the middle raises the same class, but a retry may help.
    return isinstance(error, httpx.RemoteProtocolError) and "illegal" in str(error)


def _wait(state: RetryCallState) -> float:
    """Wait as long as the server asks in Retry-After, within bounds, and ever longer otherwise."""
    backoff = _backoff(state)
    if state.outcome is None or state.outcome.failed:
        return backoff
    response: httpx.Response = state.outcome.result()
    asked: str = response.headers.get("Retry-After", "")
    return min(max(backoff, float(asked)), MAX_WAIT) if asked.isdecimal() else backoff


def _run_path(job_id: str, run_id: str) -> str:
    return f"/jobs/{_quoted(job_id)}/runs/{_quoted(run_id)}"


def _delivery_path(delivery_id: str) -> str:
    return f"/webhook/deliveries/{_quoted(delivery_id)}"


def _quoted(text: str) -> str:
    return quote(text, safe="")


def _loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
