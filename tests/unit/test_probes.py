"""The small application beside a role: readiness and metrics, for any Host."""

from __future__ import annotations

import httpx
import pytest

from conveyor.engine.telemetry import LoopLag, Telemetry
from conveyor.http.routes_server import PATHS, create_probes
from conveyor.prod.aws.calls import CallStats
from conveyor.testing.clock import FakeClock


class Probed:
    """Probes that are asked as a load balancer does: by address, with no key."""

    def __init__(self, telemetry: Telemetry) -> None:
        self.ready = True
        self.away: tuple[str, ...] = ()
        self.trouble = ""
        app = create_probes(
            telemetry.registry(),
            ready=lambda: self.ready,
            clock=FakeClock(),
            away=lambda: self.away,
            trouble=lambda: self.trouble,
        )
        self._transport = httpx.ASGITransport(app=app)

    async def get(self, path: str, method: str = "GET") -> httpx.Response:
        async with httpx.AsyncClient(
            transport=self._transport, base_url="http://10.0.3.7:9001"
        ) as client:
            return await client.request(method, path)


@pytest.fixture
def telemetry() -> Telemetry:
    return Telemetry()


async def test_readiness_is_told_to_any_host(telemetry: Telemetry) -> None:
    probed = Probed(telemetry)
    assert (await probed.get("/readyz")).status_code == 200
    probed.ready = False
    refused = await probed.get("/readyz")

    assert refused.status_code == 503
    assert refused.json()["code"] == "unavailable"
    assert refused.headers["Retry-After"] == "1"
    assert (await probed.get("/healthz")).status_code == 200


async def test_what_is_away_is_named_and_the_role_stays_ready(telemetry: Telemetry) -> None:
    probed = Probed(telemetry)
    assert (await probed.get("/readyz")).json() == {"status": "ready"}
    probed.away = ("dynamodb", "sqs")
    told = await probed.get("/readyz")

    assert told.status_code == 200
    assert told.json() == {"status": "ready", "away": ["dynamodb", "sqs"]}


async def test_a_trouble_of_the_process_itself_is_told_whatever_is_away(
    telemetry: Telemetry,
) -> None:
    """An orchestrator replaces the process for it, and never for what is away."""
    probed = Probed(telemetry)
    probed.ready, probed.away = False, ("dynamodb", "redis")
    assert (await probed.get("/livez")).json() == {"status": "alive"}
    probed.trouble = "the loop has not turned for 31 s"
    told = await probed.get("/livez")

    assert (told.status_code, told.json()["detail"]) == (503, probed.trouble)
    assert (await probed.get("/healthz")).status_code == 200


async def test_nothing_else_is_served(telemetry: Telemetry) -> None:
    probed = Probed(telemetry)

    assert {(await probed.get(path)).status_code for path in PATHS} == {200}
    for path in ("/", "/v1/jobs", "/openapi.json", "/metrics/"):
        assert (await probed.get(path)).status_code == 404
    assert (await probed.get("/metrics", "POST")).status_code == 405
    head = await probed.get("/readyz", "HEAD")
    assert head.status_code == 200


async def test_counters_of_others_are_shown_with_their_labels(telemetry: Telemetry) -> None:
    stats = CallStats()
    telemetry.family("aws_calls", lambda: stats.calls.items())
    stats.calls["sqs", "send_message_batch", "ok"] += 3
    stats.calls["dynamodb", "get_item", "refused"] += 1
    text = (await Probed(telemetry).get("/metrics")).text

    assert (
        'conveyor_aws_calls_total{operation="send_message_batch",outcome="ok",service="sqs"} 3.0'
        in text
    )
    assert text.count("conveyor_aws_calls_total{") == 2


class Ended(Exception):
    """The clock has no more to tell."""


class LateClock(FakeClock):
    """Wakes whoever sleeps so many seconds late, once for each number; then it ends them."""

    def __init__(self, *late: float) -> None:
        super().__init__()
        self._late = list(late)
        self._passed = 0.0

    def monotonic(self) -> float:
        return self._passed

    async def sleep(self, seconds: float) -> None:
        if not self._late:
            raise Ended
        self._passed += seconds + self._late.pop(0)


@pytest.mark.parametrize(("late", "lag"), [((0.5,), 0.5), ((0.5, 0.0), 0.0), ((0.0, 0.25), 0.25)])
async def test_the_latest_lag_of_a_loop_is_kept(late: tuple[float, ...], lag: float) -> None:
    measured = LoopLag(LateClock(*late))
    with pytest.raises(Ended):
        await measured.run()

    assert measured.seconds == pytest.approx(lag)
