"""The HTTP client against a server that misbehaves on purpose."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import httpx
import msgspec
import pytest
from anyio import BrokenResourceError, create_task_group, create_tcp_listener
from anyio.abc import SocketAttribute, SocketStream

from conveyor.client.api import ATTEMPTS, CONNECTIONS, Api, Patience, base_url, connect
from conveyor.client.directory import Destination
from conveyor.client.download import Downloads, download
from conveyor.client.errors import (
    ClientError,
    InvalidTasks,
    ServerRefused,
    ServerUnreachable,
    sentence,
)
from conveyor.client.inputs import ARGUMENT, SourcedTask
from conveyor.client.progress import LineTransferView, LineView
from conveyor.client.submit import JobOptions, submit
from conveyor.client.watch import follow
from conveyor.client.wire import InvalidTaskReply, RunReply
from conveyor.domain.errors import InvalidTaskReason
from tests.unit.scripted_server import KEY, RUN, Answer, Pace, asked, ok, problem, scripted


def result_row(**fields: object) -> dict[str, object]:
    return {"task_id": "T", "url": "http://a/", "status": "successful", "type": "html", **fields}


@pytest.mark.parametrize(
    ("server", "address"),
    [
        ("http://127.0.0.1:9000/v1", "http://127.0.0.1:9000/v1"),
        ("http://127.0.0.1:9000/v1/", "http://127.0.0.1:9000/v1"),
        ("127.0.0.1:9000", "http://127.0.0.1:9000/v1"),
        ("https://api.test/batch/", "https://api.test/batch/v1"),
        ("http://[::1]:9000?x=1#y", "http://[::1]:9000/v1"),
    ],
)
def test_a_server_may_be_named_in_several_ways(server: str, address: str) -> None:
    assert base_url(server) == address


@pytest.mark.parametrize(
    "server",
    [
        "ftp://x",
        "http://",
        "http://h:port",
        "",
        "http://[::1",
        "a\0b",
        "http://127.0.0.1:99999/",
        "h:65536",
        "h:0",
        "http://a..b/",
        f"{'a' * 70}:1",
    ],
)
def test_what_is_no_address_is_refused(server: str) -> None:
    with pytest.raises(ClientError, match="not a server address"):
        base_url(server)


def test_a_password_in_an_address_is_not_shown() -> None:
    with pytest.raises(ClientError) as caught:
        base_url("ftp://user:secret@h")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("key", ["", "schlüssel", "a\nb"])
async def test_a_key_that_is_no_header_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(ClientError, match="^the API key must be printable ASCII$"):
        async with connect("127.0.0.1:1", key, Pace()):
            pass


async def test_a_closed_port_is_told_at_once() -> None:
    pace = Pace()
    with scripted(ok({})) as server:
        origin = server.origin
    async with connect(origin, KEY, pace) as api:
        with pytest.raises(ServerUnreachable, match=f"cannot reach {origin}/v1: is conveyor-dev"):
            await api.job("J")
    assert pace.slept == []


async def test_a_problem_document_becomes_its_sentence_escaped() -> None:
    async with asked(problem(404, "not_found", detail="no such job\x1b[2J")) as (api, server, _):
        with pytest.raises(ServerRefused) as caught:
            await api.job("../J")
    assert str(caught.value) == "no such job\\x1b[2J (404 not_found)"
    assert (caught.value.code, caught.value.status) == ("not_found", 404)
    assert [(told.path, told.headers["X-API-Key"]) for told in server.told] == [
        ("/v1/jobs/..%2FJ", KEY)
    ]


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"{" * 5_000, b'{"code": 7}'])
async def test_an_answer_that_is_no_problem_document_is_survived(body: bytes) -> None:
    async with asked((500, {}, body)) as (api, _, _pace):
        with pytest.raises(ServerRefused, match="answered without a reason"):
            await api.job("J")


@pytest.mark.parametrize("body", [b"", b"<html>", b"{}", b'{"job_id": 1, "status": "x"}'])
async def test_an_answer_of_another_program_is_told(body: bytes) -> None:
    async with asked((200, {}, body)) as (api, _, _pace):
        with pytest.raises(ClientError, match="is not a Conveyor server"):
            await api.job("J")


@pytest.mark.parametrize(
    "answer",
    [
        (301, {"Location": "/elsewhere"}, b""),
        (404, {}, b"<html>"),
        (404, {}, b'{"detail": "Not Found"}'),
    ],
)
async def test_a_refusal_of_another_program_is_told(answer: Answer) -> None:
    async with asked(answer) as (api, server, _pace):
        with pytest.raises(ClientError) as caught:
            await api.job("J")
    assert str(caught.value) == f"{server.origin}/v1 is not a Conveyor server"


async def test_a_program_that_speaks_no_http_is_told() -> None:
    async def greet(stream: SocketStream) -> None:
        async with stream:
            await stream.receive()
            await stream.send(b"220 mail.test ESMTP\r\n\r\n")

    async with await create_tcp_listener(local_host="127.0.0.1", local_port=0) as listener:
        port = listener.extra(SocketAttribute.local_port)
        async with create_task_group() as group:
            group.start_soon(listener.serve, greet)
            async with connect(f"127.0.0.1:{port}", KEY, Pace()) as api:
                with pytest.raises(ClientError, match="/v1 is not a Conveyor server$"):
                    await api.job("J")
            group.cancel_scope.cancel()


async def test_a_code_that_the_sentence_names_is_not_repeated() -> None:
    answer = problem(400, "invalid_argument", detail="zz: not a known param (unknown_param)")
    async with asked(answer) as (api, _, _pace):
        with pytest.raises(ServerRefused) as caught:
            await api.job("J")
    assert str(caught.value) == "zz: not a known param (unknown_param)"


async def test_passing_trouble_is_waited_out_as_long_as_the_server_asks() -> None:
    limited = (429, {"Retry-After": "7"}, problem(429, "rate_limited")[2])
    broken: Answer = (0, {}, b"")
    done = ok({"job_id": "J", "status": "closed"})
    async with asked(limited, broken, problem(503, "unavailable"), done) as (api, server, pace):
        assert (await api.job("J")).job_id == "J"
    assert len(server.told) == 4
    assert pace.slept == [7, 0.5, 1.0]


@pytest.mark.parametrize("told", ["99999999", "-1", "Wed, 21 Oct 2015 07:28:00 GMT", "²", ""])
async def test_no_retry_after_hangs_a_command(told: str) -> None:
    answer = (503, {"Retry-After": told.encode().decode("latin-1")}, b"")
    async with asked(answer) as (api, server, pace):
        with pytest.raises(ServerRefused):
            await api.job("J")
    assert len(server.told) == ATTEMPTS
    assert all(0 < seconds <= 30 for seconds in pace.slept)


async def test_a_quota_is_not_waited_for() -> None:
    async with asked(problem(429, "quota_exceeded")) as (api, server, _):
        with pytest.raises(ServerRefused):
            await api.job("J")
    assert len(server.told) == 1


async def test_a_submit_that_is_sent_again_carries_the_same_key() -> None:
    reply = ok({"job_id": "J", "latest_run": RUN, "accepted_tasks": 1})
    async with asked((0, {}, b""), reply) as (api, server, _):
        await submit(api, [SourcedTask({"url": "http://a/"}, "argument")], JobOptions(name="n"))
    first, second = server.told
    assert first.body == second.body
    assert msgspec.json.decode(first.body) == {"name": "n", "tasks": [{"url": "http://a/"}]}
    assert first.headers["Idempotency-Key"] == second.headers["Idempotency-Key"] == "07" * 16


async def test_refused_tasks_are_named_by_where_they_came_from() -> None:
    bad = [{"index": 1, "reason": "malformed_url", "value": "http://u:p@\x1b"}] * 21
    bad[0] = {"index": 99, "reason": "new\nreason"}
    tasks = [SourcedTask({"url": "x"}, f"list:{line}") for line in (3, 9)]
    async with asked(problem(400, "invalid_argument", invalid_tasks=bad)) as (api, _, _pace):
        with pytest.raises(InvalidTasks) as caught:
            await submit(api, tasks, JobOptions())
    assert str(caught.value) == "21 tasks refused, nothing submitted"
    assert caught.value.lines[0] == "task 99: new\\x0areason"
    assert caught.value.lines[1] == "list:9: http://***@\\x1b: malformed URL"
    assert caught.value.lines[20:] == ["and 1 more"]


@pytest.mark.parametrize("reason", list(InvalidTaskReason))
def test_every_reason_has_a_sentence_for_people(reason: InvalidTaskReason) -> None:
    shown = sentence(InvalidTaskReply(index=0, reason=reason.value, value="http://h/"))
    assert " " in shown
    assert "_" not in shown


async def test_a_refused_argument_is_named_by_itself() -> None:
    bad = [{"index": 0, "reason": "malformed_url", "value": "example.com"}]
    async with asked(problem(400, "invalid_argument", invalid_tasks=bad)) as (api, _, _pace):
        with pytest.raises(InvalidTasks) as caught:
            await submit(api, [SourcedTask({"url": "example.com"}, ARGUMENT)], JobOptions())
    assert caught.value.lines == [
        "example.com: URL must start with http:// or https:// (for bare hosts add --scheme https)"
    ]


@pytest.mark.slow
async def test_watching_is_quick_at_first_then_once_a_second() -> None:
    done = {**RUN, "status": "completed", "stats": {"total": 1, "completed": 1, "successful": 1}}
    answers = [ok(RUN)] * 20 + [ok(done)]
    async with asked(*answers) as (api, _, pace):
        run = RunReply(run_id="R", job_id="J", status="running")
        assert (await follow(api, run, LineView(io.StringIO()))).succeeded
    assert pace.slept[0] == 0.05
    assert pace.slept == sorted(pace.slept)
    assert pace.slept[-1] == 1.0


AWAY = {"shared": "gateway", "detail": "the gateway http://***@gw.test/ cannot be reached"}


@pytest.mark.slow
@pytest.mark.parametrize("never_answered", [True, False])
async def test_what_never_answered_is_told_after_ten_seconds_and_once(never_answered: bool) -> None:
    waiting = {**RUN, "outage": {**AWAY, "never_answered": never_answered}}
    done = {**RUN, "status": "completed", "stats": {"total": 1, "completed": 1, "successful": 1}}
    sink = io.StringIO()
    async with asked(*[ok(waiting)] * 30, ok(done)) as (api, _, pace):
        run = RunReply(run_id="R", job_id="J", status="running")
        assert (await follow(api, run, LineView(sink))).succeeded
    warnings = [line for line in sink.getvalue().splitlines() if line.startswith("warning:")]
    assert len(warnings) == never_answered
    assert all("http://***@gw.test/ cannot be reached" in line for line in warnings)


async def test_what_was_silent_before_it_was_named_is_told_at_once() -> None:
    async with asked(ok({})) as (api, server, pace):
        since = "1969-12-31T23:59:50.000Z"
        waiting = {**RUN, "outage": {**AWAY, "never_answered": True, "since": since}}
        done = {**RUN, "status": "completed"}
        # The first answers the request for a stream, which is none.
        server.answers[:] = [ok(waiting), ok(waiting), ok(done)]
        sink = io.StringIO()
        run = RunReply(run_id="R", job_id="J", status="running")
        await follow(api, run, LineView(sink))
    assert sum(pace.slept) < 1
    assert "warning: the gateway http://***@gw.test/ cannot be reached" in sink.getvalue()


async def test_watching_outlives_a_server_that_is_away_but_not_for_ever() -> None:
    pace = Pace()
    sink = io.StringIO()
    with scripted(ok({})) as server:
        origin = server.origin
    async with connect(origin, KEY, pace) as api:
        with pytest.raises(ServerUnreachable):
            await follow(api, RunReply(run_id="R", job_id="J", status="running"), LineView(sink))
    assert 30 < sum(pace.slept) < 32
    assert sink.getvalue().count("trying again") == 1


LISTS = ["index.html", "manifest.jsonl"]
ENDED = RunReply(run_id="R", job_id="J", status="completed")


async def downloaded(api: Api, directory: Path) -> Downloads:
    return await download(
        api, ENDED, Destination(directory), LineTransferView(io.StringIO(), api.pace)
    )


async def test_bodies_are_fetched_without_the_key_and_tried_again(tmp_path: Path) -> None:
    short: Answer = (200, {"Content-Length": "10"}, b"half")
    whole: Answer = (200, {"Content-Type": "text/csv", "Content-Encoding": "gzip"}, b"not gzip")
    async with asked(ok({})) as (api, server, pace):
        row = result_row(result_url=f"{server.origin}/blob")
        server.answers[:] = [ok({"results": [row]}), short, whole]
        done = await downloaded(api, tmp_path)
    assert (done.files, done.problems) == (1, [])
    assert (tmp_path / "T.csv").read_bytes() == b"not gzip"
    assert names(tmp_path) == ["T.csv", *LISTS]
    _list, first, second = server.told
    assert "X-API-Key" not in first.headers
    assert "X-API-Key" not in second.headers
    assert pace.slept == [0.5]


async def test_bodies_come_from_the_store_where_the_server_names_it(tmp_path: Path) -> None:
    async with asked(ok({})) as (api, server, _):
        row = result_row(task_id="a", result_url=f"{server.origin}/blob?signature=a")
        to_store: Answer = (307, {"Location": f"{server.origin}/store"}, b"")
        body: Answer = (200, {"Content-Type": "text/csv"}, b"body")
        server.answers[:] = [ok({"results": [row]}), to_store, body]
        done = await downloaded(api, tmp_path)
    assert (done.files, done.problems) == (1, [])
    assert (tmp_path / "a.csv").read_bytes() == b"body"
    _list, link, stored = server.told
    assert (link.path, stored.path) == ("/blob?signature=a&redirect=1", "/store")
    assert "X-API-Key" not in link.headers | stored.headers


@pytest.mark.parametrize("store", [(404, {}, b"<Error/>"), (0, {}, b"")])
async def test_where_the_store_has_no_body_or_is_out_of_reach_the_server_is_asked(
    tmp_path: Path, store: Answer
) -> None:
    async with asked(ok({})) as (api, server, _):
        row = result_row(task_id="a", result_url=f"{server.origin}/blob?signature=a")
        to_store: Answer = (307, {"Location": f"{server.origin}/store"}, b"")
        server.answers[:] = [ok({"results": [row]}), to_store, store, (200, {}, b"body")]
        done = await downloaded(api, tmp_path)
    assert (done.files, done.problems) == (1, [])
    assert [told.path for told in server.told[1:]] == [
        "/blob?signature=a&redirect=1",
        "/store",
        "/blob?signature=a",
    ]


@pytest.mark.slow
async def test_a_body_without_a_link_is_fetched_once_and_others_from_the_store(
    tmp_path: Path,
) -> None:
    """A packed body has no link to the store, and one that has expired has none either: the others
    of the run may have one."""
    count = 2 * CONNECTIONS
    async with asked(ok({})) as (api, server, _):
        links = [f"/blob?signature={number}" for number in range(count)]
        rows = [
            result_row(task_id=f"{number}", result_url=f"{server.origin}{link}")
            for number, link in enumerate(links)
        ]
        gone = problem(410, "result_expired")
        server.routes = {links[0]: gone, f"{links[0]}&redirect=1": gone}
        for number, link in list(enumerate(links))[1:]:
            page: Answer = (200, {"Content-Type": "text/csv"}, b"body %d" % number)
            if number % 2:
                server.routes[f"{link}&redirect=1"] = page
            else:
                to_store: Answer = (307, {"Location": f"{server.origin}/store/{number}"}, b"")
                server.routes |= {f"{link}&redirect=1": to_store, f"/store/{number}": page}
        server.answers[:] = [ok({"results": rows})]
        done = await downloaded(api, tmp_path)
    assert (done.files, done.problems) == (count - 1, ["0: the result link answered 410"])
    for number in range(1, count):
        assert (tmp_path / f"{number}.csv").read_bytes() == b"body %d" % number
    assert sorted(told.path for told in server.told[1:]) == sorted(server.routes)


@pytest.mark.slow
async def test_a_store_that_is_out_of_reach_is_not_asked_for_each_body(tmp_path: Path) -> None:
    count = 3 * CONNECTIONS
    async with asked(ok({})) as (api, server, _):
        rows = [
            result_row(task_id=f"{number}", result_url=f"{server.origin}/blob?signature={number}")
            for number in range(count)
        ]
        for number in range(count):
            link = f"/blob?signature={number}"
            server.routes[link] = (200, {}, b"body")
            server.routes[f"{link}&redirect=1"] = (307, {"Location": "http://127.0.0.1:1/"}, b"")
        server.answers[:] = [ok({"results": rows})]
        done = await downloaded(api, tmp_path)
    assert (done.files, done.problems) == (count, [])
    assert sum("redirect" in told.path for told in server.told) <= CONNECTIONS


async def test_a_body_that_does_not_come_is_told_and_the_others_do(tmp_path: Path) -> None:
    async with asked(ok({})) as (api, server, _):
        rows = [
            result_row(task_id="gone", result_url=f"{server.origin}/x"),
            result_row(task_id="expired", status="expired"),
            result_row(task_id="bad", status="failed"),
            result_row(task_id="odd", result_url="http://[::1"),
            result_row(task_id="file", result_url="file:///etc/passwd"),
        ]
        server.answers[:] = [ok({"results": rows}), problem(410, "result_expired")]
        done = await downloaded(api, tmp_path)
    assert (done.files, done.unsuccessful_tasks) == (0, 1)
    assert len(done.problems) == 4
    assert names(tmp_path) == LISTS


async def test_a_directory_that_cannot_be_written_ends_the_command(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("a file")
    async with asked(ok({"results": []})) as (api, _, _pace):
        with pytest.raises(ClientError, match=f"^cannot write into {taken}: "):
            await downloaded(api, taken)


@pytest.mark.parametrize("where", ["taken", "taken/below"])
def test_a_directory_that_cannot_be_written_is_found_beforehand(tmp_path: Path, where: str) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(ClientError, match=f"^cannot write into {tmp_path / where}: "):
        Destination(tmp_path / where).prepare()
    Destination(tmp_path / "new" / "one").prepare()
    assert names(tmp_path / "new" / "one") == []


async def test_a_directory_of_the_name_of_a_body_stays(tmp_path: Path) -> None:
    (tmp_path / "T.html").mkdir()
    async with asked(ok({})) as (api, server, _):
        row = result_row(result_url=f"{server.origin}/x")
        server.answers[:] = [ok({"results": [row]}), (200, {}, b"body")]
        done = await downloaded(api, tmp_path)
    assert done.notes == ["T.html was there before: this one is T-2.html"]
    assert names(tmp_path) == ["T-2.html", "T.html", *LISTS]


async def test_external_ids_name_files_and_never_leave_the_directory(tmp_path: Path) -> None:
    directory = tmp_path / "out"
    async with asked(ok({})) as (api, server, _):
        ids = ["../../up", "a", "A", "NUL", "..", "/abs", ""]
        rows = [result_row(external_id=name, result_url=f"{server.origin}/x") for name in ids]
        server.answers[:] = [ok({"results": rows}), (200, {"Content-Type": "text/html"}, b"body")]
        done = await downloaded(api, directory)
    assert done.files == len(ids)
    assert names(directory) == sorted(
        [
            "_.._up.html",
            "a.html",
            "A-2.html",
            "_NUL.html",
            "_.html",
            "_abs.html",
            "T.html",
            *LISTS,
        ]
    )
    assert names(tmp_path) == ["out"]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


async def test_a_link_that_leads_nowhere_is_told_with_its_host() -> None:
    async with connect("127.0.0.1:1", KEY, Pace()) as api:
        with pytest.raises(httpx.TransportError, match=r"^127\.0\.0\.1:1: "):
            async with api.download("http://127.0.0.1:1/body?signature=s3cret") as _response:
                pass


@pytest.mark.slow
async def test_a_server_that_hangs_is_told_and_then_given_up() -> None:
    told: list[str] = []
    patience = Patience(tell=0.05, give_up=0.5)
    listener = await create_tcp_listener(local_host="127.0.0.1", local_port=0)
    async with listener, create_task_group() as group:
        group.start_soon(listener.serve, _say_nothing)
        address = f"http://127.0.0.1:{listener.extra(SocketAttribute.local_port)}/v1"
        pace = Pace()
        async with connect(address, KEY, pace, patience=patience, on_slow=told.append) as api:
            with pytest.raises(ServerUnreachable) as caught:
                await api.job("J")
        group.cancel_scope.cancel()
    assert told == [f"{address} has not answered for 0.05 s; waiting up to 0.5 s"]
    assert str(caught.value) == f"{address} does not answer: gave up after 0.5 s"
    # Another try would hang as long.
    assert pace.slept == []


async def _say_nothing(stream: SocketStream) -> None:
    # Some event loops tell the end of the client as a reset.
    with contextlib.suppress(BrokenResourceError):
        async with stream:
            async for _ in stream:
                pass


async def test_a_server_that_answers_in_time_is_not_complained_of() -> None:
    told: list[str] = []
    with scripted(ok({"job_id": "J", "status": "open"})) as server:
        async with connect(server.origin, KEY, Pace(), on_slow=told.append) as api:
            await api.job("J")
    assert told == []
