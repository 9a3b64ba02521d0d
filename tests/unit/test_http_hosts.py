"""The work of a run at each host, over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conveyor.domain.hosts import HostPattern, HostPolicies, HostRules, Politeness, host_key
from conveyor.domain.run_waits import LaneReport, WorkerReport
from conveyor.domain.text_rules import rfc3339
from conveyor.service import hosts
from conveyor.service.waiting import READ_EVERY
from tests.unit.http_api import KEY, Api, open_api, problem_of

SHOP, NEWS = "shop.test:443", "news.test:8080"
POLICIES = HostPolicies(
    lambda: HostRules(limit=5, patterns={"*.test": HostPattern(rate=2.0, together=True)})
)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def submitted(api: Api, *urls: str, **fields: Any) -> tuple[str, str]:
    """Submit these URLs; (job_id, run_id)."""
    body = {"tasks": [{"url": url} for url in urls], **fields}
    answer = await api.client.post("/v1/jobs", json=body)
    assert answer.status_code == 201, answer.text
    return answer.json()["job_id"], answer.json()["latest_run"]["run_id"]


async def hosts_of(api: Api, job_id: str, run_id: str, query: str = "") -> dict[str, Any]:
    """Read the hosts of a run, once the document was found to be as described."""
    answer = await api.client.get(f"/v1/jobs/{job_id}/runs/{run_id}/hosts{query}")
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def report(api: Api, name: str, run_id: str, calls: dict[str, int]) -> WorkerReport:
    """The word of a worker with so many calls to hosts of a run."""
    return WorkerReport(
        worker_id=name,
        version="1",
        started_at=api.clock.now(),
        said_at=api.clock.now(),
        heartbeat=10.0,
        slots=9,
        in_use=2,
        lanes=(LaneReport(run_id=run_id, hosts=calls),),
    )


async def test_each_host_shows_its_own_tasks_and_the_busiest_comes_first(tmp_path: Path) -> None:
    async with open_api(tmp_path / "data") as api:
        shop, news = "https://Shop.test./", "http://news.test:8080/"
        job_id, run_id = await submitted(api, *[f"{shop}{n}" for n in range(4)], news, news)
        rows = await api.tasks_of(run_id)
        await api.claim(run_id, rows[5].task_id)
        await api.fail(run_id, rows[0].task_id)
        for row in rows[1:3]:
            await api.succeed(job_id, run_id, row.task_id)

        assert await hosts_of(api, job_id, run_id) == {
            "run_id": run_id,
            "tasks": 6,
            "counted_tasks": 6,
            "hosts": [
                {"host": NEWS, "pending": 1, "claimed": 1, "done": 0, "failed": 0},
                {"host": SHOP, "pending": 1, "claimed": 0, "done": 2, "failed": 1},
            ],
            "more_hosts": 0,
        }


async def test_the_closest_limits_show_and_what_a_host_has_said(tmp_path: Path) -> None:
    async with open_api(tmp_path / "data", policies=POLICIES) as api:
        manners = {"per_host": 3, "per_host_rate": 9}
        job_id, run_id = await submitted(api, "https://a.shop.test/", politeness=manners)
        found = await hosts_of(api, job_id, run_id)
        assert found["hosts"][0] == {
            "host": "a.shop.test:443",
            "pending": 1,
            "claimed": 0,
            "done": 0,
            "failed": 0,
            "limit": 3,
            "rate": 2.0,
            "limit_set_by": "job",
            "rate_set_by": "pattern",
            "pattern": "*.test",
            "together": True,
            "detail": "at most 3 calls at a time, set by the job (--per-host); at most 2 calls "
            'a second, set by the server\'s file of hosts ("*.test") for all hosts of *.test '
            "together",
        }

        await api.binding.pacing.close(host_key("*.test"), 60)
        await api.binding.pacing.lower(host_key("*.test"), 5, 0.0)
        found = await hosts_of(api, job_id, run_id)
        until = rfc3339(api.clock.now() + 60_000)
        assert {"ceiling": 2, "closed_until": until}.items() <= found["hosts"][0].items()
        said = found["hosts"][0]["detail"]
        pause = until[:19].replace("T", " ")
        assert said.startswith(
            f"it asked for a pause: no call before {pause} UTC; at most 2 at a time for now, since "
            "it refused calls; at most 3 calls at a time, set by the job"
        )


async def test_a_host_shows_what_its_robots_txt_asks_for(tmp_path: Path) -> None:
    async with open_api(tmp_path / "data") as api:
        job_id, run_id = await submitted(api, "https://a.test/", politeness={"robots": True})
        [host] = (await hosts_of(api, job_id, run_id))["hosts"]
        assert host["detail"] == "its robots.txt may ask for a pause between calls (Crawl-delay)"
        caller = api.service.identify(KEY).caller_id
        await api.binding.pacing.slow(host_key("a.test:443", caller), 2.5, 600.0)
        other_job, other_run = await submitted(api, "https://a.test/", politeness={"per_host": 2})
        for one in ((job_id, run_id), (other_job, other_run)):
            [host] = (await hosts_of(api, *one, "?held=1"))["hosts"]
            assert host["interval"] == 2.5
            assert "its robots.txt asks for 2.5 s between calls" in host["detail"]


async def test_a_host_shows_that_other_jobs_wait_for_it_too(tmp_path: Path) -> None:
    async with open_api(tmp_path / "data", policies=POLICIES) as api:
        pacing = api.binding.pacing
        job_id, run_id = await submitted(api, *["https://a.shop.test/"] * 3)
        for run, places in ((run_id, 3), ("other", 2)):
            for _ in range(places):
                await pacing.line_up(host_key("*.test"), 10.0, run)
        [host] = (await hosts_of(api, job_id, run_id, "?held=1"))["hosts"]
        assert host["detail"].endswith("; other jobs have at least 2 tasks in its line")

        calls = {"a.shop.test:443": 4, "b.test:443": 5}
        await api.binding.workers.say(report(api, "worker", "other", calls))
        await api.clock.advance(READ_EVERY)
        [host] = (await hosts_of(api, job_id, run_id, "?held=1"))["hosts"]
        assert host["detail"].endswith(
            "; other jobs have 4 calls under way and at least 2 tasks in its line"
        )
        await pacing.leave("other", [host_key("*.test")])
        await api.binding.workers.say(report(api, "worker", run_id, calls))
        await api.clock.advance(READ_EVERY)
        [host] = (await hosts_of(api, job_id, run_id, "?held=1"))["hosts"]
        assert "other jobs" not in host["detail"]


async def test_a_host_shows_that_it_is_closed_to_the_caller_alone(tmp_path: Path) -> None:
    async with open_api(tmp_path / "data", policies=POLICIES) as api:
        job_id, run_id = await submitted(api, "https://a.shop.test/")
        caller = api.service.identify(KEY).caller_id
        await api.binding.pacing.close(host_key("a.shop.test:443", caller), 60)
        found = await hosts_of(api, job_id, run_id)
        until = rfc3339(api.clock.now() + 60_000)
        assert {"limit": 5, "closed_until": until}.items() <= found["hosts"][0].items()


async def test_a_rerun_shows_only_what_it_does_itself(tmp_path: Path) -> None:
    async with open_api(tmp_path / "data") as api:
        urls = "https://shop.test/", "http://news.test:8080/"
        job_id, first = await submitted(api, *urls, politeness={"per_host": 2})
        rows = await api.tasks_of(first)
        await api.succeed(job_id, first, rows[0].task_id)
        await api.fail(first, rows[1].task_id)
        answer = await api.client.post(f"/v1/jobs/{job_id}/rerun?status=failed")
        assert answer.status_code == 201, answer.text
        second = answer.json()["latest_run"]["run_id"]
        found = await hosts_of(api, job_id, second)

        assert [one["host"] for one in found["hosts"]] == [NEWS]
        assert (found["tasks"], found["counted_tasks"]) == (2, 2)
        run = await api.binding.runs.dispatchable_run(second)
        assert run is not None
        assert run.politeness == Politeness(per_host=2)


@pytest.mark.parametrize("sharded", [False, True])
async def test_a_large_run_is_looked_at_everywhere_within_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sharded: bool
) -> None:
    monkeypatch.setattr(hosts, "MOST_ROWS", 20)
    monkeypatch.setattr(hosts, "PIECE", 5)
    monkeypatch.setattr(hosts, "MOST_HOSTS", 3)
    async with open_api(tmp_path / "data", task_shard_count=3) as api:
        status = {"status": "open"} if sharded else {}
        urls = [f"https://h{number // 10}.test/{number}" for number in range(40)]
        job_id, run_id = await submitted(api, *urls, **status)
        found = await hosts_of(api, job_id, run_id)

        assert (found["tasks"], found["counted_tasks"], found["more_hosts"]) == (40, 20, 1)
        assert [one["pending"] for one in found["hosts"]] == [5, 5, 5]
        assert [one["claimed"] for one in found["hosts"]] == [0, 0, 0]

        for number in range(2):
            await api.binding.workers.say(
                report(api, f"worker{number}", run_id, {"h3.test:443": 2})
            )
        await api.clock.advance(READ_EVERY)
        busiest = (await hosts_of(api, job_id, run_id))["hosts"][0]
        assert (busiest["host"], busiest["claimed"]) == ("h3.test:443", 4)


async def test_hosts_of_a_run_of_somebody_else_are_not_found(tmp_path: Path) -> None:
    async with open_api(tmp_path / "data") as api:
        job_id, run_id = await submitted(api, "https://shop.test/")
        answer = await api.foreign.get(f"/v1/jobs/{job_id}/runs/{run_id}/hosts")
        problem_of(answer, status=404, code="not_found")


@pytest.mark.parametrize(
    ("rules", "manners", "shown"),
    [
        (HostRules(limit=2), None, {"limit": 2, "limit_set_by": "server"}),
        (HostRules(limit=2, rate=1.0), {"per_host": 9, "per_host_rate": 0.5},
         {"limit": 2, "limit_set_by": "server", "rate": 0.5, "rate_set_by": "job"}),
        (HostRules(), {"per_host": 9}, {"limit": 9, "limit_set_by": "job"}),
        (HostRules(limit=5, patterns={"*.test": HostPattern(together=True)}), {"per_host": 9},
         {"limit": 5, "limit_set_by": "server", "pattern": "*.test", "together": True}),
        (HostRules(patterns={"*.test": HostPattern(limit=7, together=True)}), {"per_host": 3},
         {"limit": 3, "limit_set_by": "job"}),
        (HostRules(patterns={"a.test:443": HostPattern(limit=7)}), {"per_host": 7},
         {"limit": 7, "limit_set_by": "pattern", "pattern": "a.test:443"}),
    ],
    ids=["server", "each of one", "job", "together by name alone", "stricter job", "as strict"],
)  # fmt: skip
async def test_a_limit_shows_who_set_it(
    tmp_path: Path, rules: HostRules, manners: dict[str, Any] | None, shown: dict[str, Any]
) -> None:
    async with open_api(tmp_path / "data", policies=HostPolicies(lambda: rules)) as api:
        fields = {} if manners is None else {"politeness": manners}
        job_id, run_id = await submitted(api, "https://a.test/", **fields)
        [host] = (await hosts_of(api, job_id, run_id))["hosts"]
        counts = {"host", "pending", "claimed", "done", "failed", "detail"}
        assert {name: host[name] for name in host.keys() - counts} == shown


async def test_hosts_that_hold_a_run_back_are_those_with_limits_for_which_tasks_wait(
    tmp_path: Path,
) -> None:
    limits = {"shop.test": HostPattern(limit=1), "done.test": HostPattern(limit=1),
              "slow.test": HostPattern(rate=0.5)}  # fmt: skip
    policies = HostPolicies(lambda: HostRules(patterns=limits))
    async with open_api(tmp_path / "data", policies=policies) as api:
        shop, slow = "https://shop.test/", "https://slow.test/"
        urls = ["https://done.test/", shop, shop, "https://free.test/", slow, slow]
        job_id, run_id = await submitted(api, *urls)
        rows = await api.tasks_of(run_id)
        await api.claim(run_id, rows[0].task_id)
        await api.claim(run_id, rows[1].task_id)

        found = await hosts_of(api, job_id, run_id, "?held=1")
        assert (found["tasks"], found["counted_tasks"], found["more_hosts"]) == (6, 6, 0)
        told = [(one["host"], one["pending"], one["claimed"]) for one in found["hosts"]]
        assert told == [("slow.test:443", 2, 0), (SHOP, 1, 1)]
        assert len((await hosts_of(api, job_id, run_id, "?held=0"))["hosts"]) == 4

        assert (await api.client.post(f"/v1/jobs/{job_id}/pause")).status_code == 200
        assert (await hosts_of(api, job_id, run_id, "?held=1"))["hosts"] == []


async def test_no_row_is_read_for_what_holds_a_run_back_where_no_limit_holds(
    tmp_path: Path,
) -> None:
    async with open_api(tmp_path / "data") as api:
        job_id, run_id = await submitted(api, "https://shop.test/")
        found = await hosts_of(api, job_id, run_id, "?held=1")
        assert (found["counted_tasks"], found["hosts"]) == (0, [])


async def test_a_large_run_is_looked_at_in_few_rows_from_everywhere_for_what_holds_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "MOST_ROWS_HELD", 20)
    async with open_api(tmp_path / "data", policies=POLICIES) as api:
        job_id, run_id = await submitted(
            api, *[f"https://h{n // 100}.test/{n}" for n in range(400)]
        )
        found = await hosts_of(api, job_id, run_id, "?held=1")
        assert (found["tasks"], found["counted_tasks"]) == (400, 20)
        assert [one["pending"] for one in found["hosts"]] == [6, 6, 4, 4]


async def test_a_filter_of_hosts_that_is_none_is_refused(tmp_path: Path) -> None:
    async with open_api(tmp_path / "data") as api:
        job_id, run_id = await submitted(api, "https://shop.test/")
        answer = await api.client.get(f"/v1/jobs/{job_id}/runs/{run_id}/hosts?held=yes")
        problem_of(answer, status=400, code="invalid_argument")
