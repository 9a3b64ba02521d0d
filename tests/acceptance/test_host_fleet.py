"""The limits of hosts over a fleet in trouble, as the sites themselves see them: a worker is
killed, clocks are 30 s apart, and the ledger comes back empty."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.acceptance.support_calls import Caller
from tests.acceptance.support_fleet import direct_fleet
from tests.acceptance.support_site import in_background
from tests.acceptance.support_wire import eventually
from tests.acceptance.test_host_limits import LoggingSite
from tests.conformance.redis_process import RedisProcess

pytestmark = [pytest.mark.server, pytest.mark.full, pytest.mark.extended, pytest.mark.slow]

TASKS, SITES, LIMIT, RATE = 10_000, 20, 3, 8


def ahead(_role: str, number: int) -> Sequence[str]:
    """Every second process believes that it is later."""
    return ("--ahead", str(30.0 * (number % 2)))


@pytest.mark.timeout(2_400)
def test_no_site_ever_has_more_than_its_limits(tmp_path: Path) -> None:
    (tmp_path / "redis").mkdir()
    redis = RedisProcess(tmp_path / "redis")
    with ExitStack() as stack:
        stack.callback(redis.close)
        sites = [stack.enter_context(LoggingSite()) for _ in range(SITES)]
        for site in sites:
            stack.enter_context(in_background(site))
        fleet = stack.enter_context(
            direct_fleet(
                tmp_path / "fleet",
                workers=4,
                trouble=ahead,
                redis_url=redis.url,
                host_limit=LIMIT,
                host_rate=RATE,
                permit_lease=10,
                heartbeat=2,
                visibility_timeout=60,
                sweep_interval=5,
                quiet_after=30,
            )
        )
        caller = stack.enter_context(Caller(fleet.api))
        urls = [f"{sites[number % SITES].origin}/{number}" for number in range(TASKS)]
        job = caller.submit(*urls)

        def called(count: int) -> None:
            eventually(
                lambda: sum(len(site.starts) for site in sites) >= count or None,
                f"{count} calls",
                timeout=900,
            )

        called(TASKS // 5)
        fleet.workers[1].kill()
        called(TASKS // 4)
        fleet.restart(fleet.workers[1])
        called(TASKS // 2)
        redis.kill()
        redis.start()
        assert caller.wait(job, 1_800)["stats"]["successful"] == TASKS
    assert max(site.peak for site in sites) <= LIMIT
    assert max(site.most_within(0.9) for site in sites) <= RATE
    assert max(site.most_within(10.0) for site in sites) <= 10 * RATE + 1
