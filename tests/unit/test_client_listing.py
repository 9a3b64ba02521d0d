"""Results for people: the table at every width, and failures by their reason."""

from __future__ import annotations

import pytest
from rich.cells import cell_len

from conveyor.client.listing import (
    SAMPLE_ROWS,
    FailureSummary,
    ResultTable,
    cause_line,
    job_line,
    jobs_header,
    waiting_line,
)
from conveyor.client.wire import (
    FailureGroupReply,
    JobReply,
    OutageReply,
    ProblemReply,
    ResultRow,
    RunReply,
    StatsReply,
    WaitReply,
)

LONG = "https://shop.example.com/catalogue/category/subcategory/item-000017.html?ref=1"


def row(**fields: object) -> ResultRow:
    values = {
        "task_id": "0000000B4353F53A912F634BE8",
        "url": LONG,
        "status": "successful",
        "size": 1_234_567,
        "updated_at": "2026-01-02T03:04:05.678Z",
    }
    return ResultRow(**(values | fields))  # type: ignore[arg-type]


FAILED = row(status="failed", size=None, error=ProblemReply(code="bad_target", title="Not Found"))


def table(width: int | None, *rows: ResultRow) -> list[str]:
    lines: list[str] = []
    shown = ResultTable(lines.append, width)
    for one in rows:
        shown.add(one)
    assert shown.end() is bool(rows)
    return lines


def test_a_table_has_a_header_status_time_size_and_reason() -> None:
    assert table(None, row(external_id="item-17"), FAILED) == [
        "status      ended, UTC               size  id                          url, reason",
        f"successful  2026-01-02 03:04:05    1.2 MB  item-17                     {LONG}",
        "failed      2026-01-02 03:04:05            0000000B4353F53A912F634BE8  "
        f"{LONG}  bad_target",
    ]


def test_a_narrow_terminal_has_fewer_columns_and_the_ends_of_urls() -> None:
    assert table(80, row(), FAILED) == [
        "status      UTC           size  url, reason",
        "successful  03:04:05    1.2 MB  https://shop.example.co…y/item-000017.html?ref=1",
        "failed      03:04:05            https://shop.exam…-000017.html?ref=1  bad_target",
    ]
    assert table(40, FAILED) == [
        "status      url, reason",
        "failed      https:/…ml?ref=1  bad_target",
    ]
    assert table(80, row(external_id="x"))[1].split()[2:5] == ["1.2", "MB", "x"]


@pytest.mark.parametrize("url", [LONG, "http://a/" + "日本" * 60, "http://a/"])
def test_no_line_is_longer_than_the_terminal(url: str) -> None:
    rows = [row(url=url), row(url=url, external_id="n" * 90), FAILED, row(status="an unknown word")]
    for width in range(1, 150):
        for line in table(width, *rows):
            assert cell_len(line) <= width
            assert line


def test_what_has_not_ended_has_no_end() -> None:
    (_, line) = table(None, row(status="processing", size=None, external_id="x"))
    assert line.split() == ["processing", "x", LONG]


def test_a_row_that_waits_says_why_and_until_when() -> None:
    wait = WaitReply(reason="retry_after", until="2026-01-02T03:04:05.678Z")
    waits = row(status="pending", size=None, external_id="x", waiting=wait)
    assert table(None, waits)[1].endswith(
        f"{LONG}  retry_after, waits until 2026-01-02 03:04:05 UTC"
    )
    assert table(80, row(status="pending", size=None, waiting=wait))[1].endswith(
        "  retry_after…03:04:05 UTC"
    )


def test_rows_are_written_while_more_come() -> None:
    lines: list[str] = []
    shown = ResultTable(lines.append, None)
    for _ in range(SAMPLE_ROWS + 1):
        shown.add(row())
    assert len(lines) == SAMPLE_ROWS + 2
    assert table(None) == []


def failed(code: str, title: str, url: str = "http://a/", status: int = 0) -> ResultRow:
    return row(url=url, status="failed", error=ProblemReply(code=code, title=title, status=status))


def groups(*rows: ResultRow, own_server: bool = False) -> list[str]:
    grouped = FailureSummary(own_server=own_server)
    for one in rows:
        grouped.add(one)
    assert grouped.tasks == len(rows)
    return grouped.lines()


def test_failures_are_a_line_a_reason_the_most_frequent_first() -> None:
    private = [failed("address_refused", "not public", f"http://10.0.0.{n}/") for n in range(200)]
    lines = groups(failed("odd", "Odd\x1b"), *private)
    assert lines == [
        "failed: 200 tasks: not public (address_refused), first http://10.0.0.0/; start the server"
        " with --allow-private to fetch private addresses too",
        "failed: http://a/: Odd\\x1b (odd)",
    ]
    assert groups(*private, own_server=True)[0].endswith(
        "; --allow-private fetches private addresses too"
    )


@pytest.mark.parametrize(
    ("code", "fix"),
    [
        ("host_not_found", "check the spelling of the host, and the resolver of the server"),
        ("connection_failed", "check host and port: nothing took the connection"),
        ("tls_failed", "check the certificate of the host, and whether its port speaks TLS"),
        ("timeout", "raise CONVEYOR_GATEWAY_TIMEOUT of the server"),
        ("bad_target", "--param allowed_status_codes=404 keeps such pages"),
    ],
)
def test_a_reason_comes_with_what_mends_it(code: str, fix: str) -> None:
    assert groups(failed(code, "t", status=404)) == [f"failed: http://a/: t ({code}); {fix}"]


def test_a_terminal_gets_lines_that_break_between_words() -> None:
    grouped = FailureSummary(own_server=False)
    grouped.add(failed("connection_failed", "no connection could be made", LONG))
    lines = grouped.lines(40)[0].splitlines()
    assert all(len(line) <= 40 or LONG in line for line in lines)
    assert " ".join(line.strip() for line in lines) == grouped.lines()[0]
    assert len(lines) > 2


def test_many_reasons_are_cut_and_counted() -> None:
    lines = groups(*(failed(f"c{n}", "t") for n in range(13)), row(status="failed"))
    assert lines[-1] == "failed: 4 tasks for 4 other reasons"
    assert len(lines) == 11


def test_a_program_gets_the_same_reasons() -> None:
    grouped = FailureSummary(own_server=False)
    for one in (failed("odd", "Odd"), failed("timeout", "t", "http://b/"), failed("timeout", "t")):
        grouped.add(one)
    fix = "raise CONVEYOR_GATEWAY_TIMEOUT of the server"
    assert grouped.documents() == [
        {"code": "timeout", "reason": "t", "tasks": 2, "first_url": "http://b/", "fix": fix},
        {"code": "odd", "reason": "Odd", "tasks": 1, "first_url": "http://a/", "fix": None},
    ]


def test_a_password_in_a_failed_url_is_not_shown() -> None:
    assert "secret" not in groups(failed("odd", "t", "http://u:secret@a/"))[0]


@pytest.mark.parametrize(
    ("group", "title", "line"),
    [
        (FailureGroupReply(group="g", count=12, reason="bad_target", code="bad_target", status=404,
                           detail="the page answered 404"), "Not Found",
         "12 tasks failed: the page answered 404 (bad_target, 404), such as http://a/\\x1b; "
         "--param allowed_status_codes=404 keeps such pages"),
        (FailureGroupReply(group="g", count=1, reason="gateway_error", code="host_not_found"),
         "No such host",
         "1 task failed: No such host (gateway_error, host_not_found), such as http://a/\\x1b; "
         "check the spelling of the host, and the resolver of the server"),
        (FailureGroupReply(group="g", count=1, reason="timeout", code="timeout"), "",
         "1 task failed: timeout (timeout), such as http://a/\\x1b; raise "
         "CONVEYOR_GATEWAY_TIMEOUT of the server"),
        (FailureGroupReply(group="other", count=7), "", "7 tasks failed for other reasons"),
    ],
)  # fmt: skip
def test_a_cause_is_told_with_an_example_and_what_mends_it(
    group: FailureGroupReply, title: str, line: str
) -> None:
    error = ProblemReply(code="c", title=title)
    row = ResultRow(task_id="t", url="http://a/\x1b", status="failed", error=error)
    assert cause_line(group, row) == line


def test_a_task_that_waits_is_told_with_why_and_until_when() -> None:
    wait = WaitReply(reason="host_retry_after", until="2026-11-30T10:15:00.000Z")
    row = ResultRow(task_id="t", url="http://a/\x1b", status="pending", waiting=wait)
    assert waiting_line(row) == (
        "such as http://a/\\x1b: host_retry_after, waits until 2026-11-30 10:15:00 UTC"
    )


def job(total: int, failed: int, *, name: str = "", outage: OutageReply | None = None) -> JobReply:
    stats = StatsReply(total=total, completed=total, successful=total - failed, failed=failed)
    run = RunReply(run_id="R", job_id="J", status="completed", stats=stats, outage=outage)
    if outage is not None:
        run = RunReply(run_id="R", job_id="J", status="running", stats=stats, outage=outage)
    return JobReply(
        job_id="01M8MEDFTGV7KEBCT8GZ4BZHEA",
        status="closed",
        name=name,
        created_at="2026-11-30T17:05:31.123Z",
        latest_run=run,
    )


def test_a_job_off_a_terminal_is_written_in_full() -> None:
    assert jobs_header(None) == f"{'job':<26}  {'created, UTC':<19}  {'state':<10}  tasks, name"
    assert job_line(job(20_000, 12, name="n" * 41), None) == (
        "01M8MEDFTGV7KEBCT8GZ4BZHEA  2026-11-30 17:05:31  completed   "
        f"20,000/20,000 done, 12 failed  {'n' * 39}…"
    )


def test_a_job_whose_tasks_failed_keeps_its_numbers_in_80_columns() -> None:
    assert jobs_header(80) == ("job                         UTC          state       tasks, name")
    assert job_line(job(20, 3, name="books"), 80) == (
        "01M8MEDFTGV7KEBCT8GZ4BZHEA  11-30 17:05  completed   20/20 done, 3 failed  books"
    )
    assert job_line(job(20_000, 12), 80).endswith("  20,000/20,000, 12 failed")


def test_no_line_of_a_job_is_longer_than_the_terminal() -> None:
    away = OutageReply(shared="file descriptors")
    jobs = [job(20, 3, name="書籍" * 30), job(1_000_000, 1_000_000), job(9, 0, outage=away)]
    for width in range(1, 150):
        for line in [jobs_header(width), *(job_line(one, width) for one in jobs)]:
            assert cell_len(line) <= width
