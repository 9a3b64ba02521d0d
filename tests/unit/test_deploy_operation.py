"""The deployment template runs the roles as they want to be run: behind a load balancer, with as
many workers as the backlog asks for, and under alarms that somebody can act upon."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

from conveyor.bootstrap.production import _protection
from conveyor.domain.model import DispatchableRun
from conveyor.engine.lanes import Lanes
from conveyor.engine.telemetry import Backlog, Reports, TaskFigures, Telemetry
from conveyor.gateway.fake import FakeGateway
from conveyor.gateway.watch import WatchedGateway
from conveyor.roles.logs import JsonFormatter
from conveyor.roles.production import KEEP_ALIVE
from conveyor.settings import load
from conveyor.testing.clock import FakeClock
from tests.unit.dispatch_world import World, idle_worker
from tests.unit.schedule_world import open_schedules

TEMPLATE = Path(__file__).parents[2] / "scripts" / "deploy" / "template.yaml"
RUNBOOK = TEMPLATE.parents[2] / "docs" / "operations.md"
ENVIRONMENT = "${Environment}"
VARIABLE = "CONVEYOR_SHUTDOWN_GRACE"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def template() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(TEMPLATE.read_text())
    return loaded


@pytest.fixture(scope="module")
def resources(template: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = template["Resources"]
    return found


@pytest.fixture(scope="module")
def alarms(resources: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        one["Properties"] for one in resources.values() if one["Type"] == "AWS::CloudWatch::Alarm"
    ]


@pytest.fixture(scope="module")
def idle_timeout(resources: dict[str, Any]) -> int:
    """Seconds for which the balancer keeps a connection on which nothing comes."""
    attributes = resources["Balancer"]["Properties"]["LoadBalancerAttributes"]
    told = {one["Key"]: one["Value"] for one in attributes}
    return int(told["idle_timeout.timeout_seconds"])


class SevenMessages:
    """Queues that hold seven messages each."""

    async def count(self, queue: str) -> int:
        return 7


def test_the_balancer_lets_go_of_a_connection_before_an_api_does(idle_timeout: int) -> None:
    """Else it sends a request on a connection that is being closed, and answers 502 for it."""
    assert 0 < idle_timeout < KEEP_ALIVE


def test_a_request_that_is_checked_for_long_is_waited_for(idle_timeout: int) -> None:
    """No byte of an answer comes meanwhile."""
    assert idle_timeout > load({}, production=True, role="api").max_validation_seconds


async def test_workers_are_added_by_all_that_waits_and_may_run(
    resources: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The line that workers log is the one that the filter finds. Each counts the whole, and one
    that just came may see less: so neither a sum nor a mean."""
    lanes = Lanes(control_limit=1)
    lanes.open(
        DispatchableRun(run_id="run", job_id="job", priority=5, max_inflight=3, created_at=0)
    )
    with caplog.at_level("INFO", "conveyor.engine"):
        await Backlog(lanes, SevenMessages()).tell()
    [record] = caplog.records
    line = json.loads(JsonFormatter().format(record))
    for name, figure in (("Backlog", 14), ("Runnable", 10)):
        found = resources[name]["Properties"]
        [metric] = found["MetricTransformations"]
        assert metric["MetricName"] == name
        assert found["FilterPattern"] == f'{{ $.message = "{line["message"]}" }}'
        assert line[metric["MetricValue"].removeprefix("$.")] == figure

    policy = resources["WorkerScalingPolicy"]["Properties"]
    tracking = policy["TargetTrackingScalingPolicyConfiguration"]
    metrics = {one["Id"]: one for one in tracking["CustomizedMetricSpecification"]["Metrics"]}
    runnable = metrics["runnable"]["MetricStat"]
    assert runnable["Metric"]["MetricName"] == "Runnable"
    assert runnable["Metric"]["Namespace"] == metric["MetricNamespace"]
    assert runnable["Stat"] == "Maximum"
    assert metrics["share"]["Expression"] == "runnable / workers"
    assert tracking["TargetValue"] == {"Ref": "CallsPerWorker"}
    assert [name for name, one in metrics.items() if one["ReturnData"]] == ["share"]


@pytest.mark.parametrize(
    ("secret", "reason"), [(b"gone", "key_unreadable"), (b"kept", "quota_exceeded")]
)
async def test_fires_that_are_lost_are_counted_by_what_a_worker_logs(
    resources: dict[str, Any],
    alarms: list[dict[str, Any]],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    secret: bytes,
    reason: str,
) -> None:
    """Those that a limit refuses are logged too, and not counted."""
    async with open_schedules(tmp_path) as world:
        world.max_active_jobs = 1
        for _ in range(2 if reason == "quota_exceeded" else 1):
            await world.add(sealed_key=world.sealed("caller", b"kept"))
        await world.clock.advance(3_600.0)
        with caplog.at_level("WARNING", "conveyor.handlers"):
            await world.scheduler(secret).fire()
    [record] = caplog.records
    line = json.loads(JsonFormatter().format(record))
    found = resources["LostFires"]["Properties"]
    [metric] = found["MetricTransformations"]
    wanted = re.fullmatch(
        r'{ \(\$\.message = "(.+)"\) && \(\$\.reason != "(.+)"\) }', found["FilterPattern"]
    )
    assert wanted is not None
    assert line["message"] == wanted[1]
    assert line["reason"] == reason
    assert wanted[2] == "quota_exceeded"
    assert line[metric["MetricValue"].removeprefix("$.")] == 1
    [alarm] = [one for one in alarms if one.get("MetricName") == metric["MetricName"]]
    assert alarm["Namespace"] == metric["MetricNamespace"]


async def test_alarms_watch_the_line_that_workers_log_of_webhooks(
    resources: dict[str, Any], alarms: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    telemetry = Telemetry()
    reports = Reports(telemetry, notices=lambda: 3.0, events=lambda: 1.0)
    for outcome in ("delivered", "http_5xx", "timeout"):
        telemetry.webhook_attempted(outcome)
    with caplog.at_level("INFO", "conveyor.engine"):
        await reports.tell()
    [record] = caplog.records
    line = json.loads(JsonFormatter().format(record))
    found = {}
    for name in ("WebhooksDelivered", "WebhooksFailed", "WebhooksOldest"):
        properties = resources[name]["Properties"]
        [metric] = properties["MetricTransformations"]
        assert properties["FilterPattern"] == f'{{ $.message = "{line["message"]}" }}'
        found[metric["MetricName"]] = line[metric["MetricValue"].removeprefix("$.")]
    assert found == {"WebhooksDelivered": 1, "WebhooksFailed": 2, "WebhooksOldest": 3.0}
    watched = {
        stat["Metric"]["MetricName"]
        for alarm in alarms
        for one in alarm.get("Metrics", [])
        if (stat := one.get("MetricStat"))
    } | {alarm.get("MetricName") for alarm in alarms}
    assert found.keys() <= watched


async def test_the_line_of_webhooks_tells_what_came_since_the_one_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    telemetry = Telemetry()
    reports = Reports(telemetry, notices=lambda: 0.0, events=lambda: 0.0)
    with caplog.at_level("INFO", "conveyor.engine"):
        for outcomes in (["delivered", "timeout"], ["delivered", "delivered", "http_4xx"], []):
            for outcome in outcomes:
                telemetry.webhook_attempted(outcome)
            await reports.tell()
    lines = [json.loads(JsonFormatter().format(record)) for record in caplog.records]
    assert [(line["delivered"], line["failed"]) for line in lines] == [(1, 1), (2, 1), (0, 0)]


async def test_alarms_watch_what_workers_log_of_their_progress(
    resources: dict[str, Any], alarms: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    telemetry = Telemetry()
    figures = TaskFigures(telemetry)
    telemetry.task_ended("failed")
    telemetry.fenced(2)
    for seconds in (*[0.2] * 19, 7.0):
        telemetry.task_settled(seconds)
    with caplog.at_level("INFO", "conveyor.engine"):
        await figures.tell()
    [record] = caplog.records
    line = json.loads(JsonFormatter().format(record))
    for name, figure in (("TasksEnded", 1), ("CallsFenced", 2), ("Settlement", 0.25)):
        properties = resources[name]["Properties"]
        [metric] = properties["MetricTransformations"]
        assert f'$.message = "{line["message"]}"' in properties["FilterPattern"]
        assert line[metric["MetricValue"].removeprefix("$.")] == figure
        assert metric["MetricName"] in str(alarms)
    [fenced] = [one for one in alarms if one.get("MetricName") == "CallsFenced"]
    assert (fenced["Statistic"], fenced["Threshold"]) == ("Sum", 0)


async def test_a_worker_that_settled_nothing_tells_no_duration_of_it(
    resources: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    telemetry = Telemetry()
    telemetry.task_settled(0.2)
    figures = TaskFigures(telemetry)  # which tells what came since
    with caplog.at_level("INFO", "conveyor.engine"):
        await figures.tell()
        telemetry.task_settled(90.0)
        await figures.tell()
    lines = [json.loads(JsonFormatter().format(record)) for record in caplog.records]

    assert "settlement_seconds" not in lines[0]
    assert lines[1]["settlement_seconds"] == 20.0  # the last bound
    pattern = resources["Settlement"]["Properties"]["FilterPattern"]
    assert pattern == '{ ($.message = "progress") && ($.settlement_seconds >= 0) }'


def test_tasks_that_wait_while_none_ends_are_noticed(alarms: list[dict[str, Any]]) -> None:
    [stuck] = [one for one in alarms if "no-progress" in str(one["AlarmName"])]
    metrics = {one["Id"]: one for one in stuck["Metrics"]}

    assert metrics["stuck"]["Expression"] == "IF(FILL(ended, 0) < 1, backlog, 0)"
    assert metrics["stuck"]["ReturnData"]
    named = {name: metrics[name]["MetricStat"] for name in ("backlog", "ended")}
    assert {name: one["Metric"]["MetricName"] for name, one in named.items()} == {
        "backlog": "Backlog",
        "ended": "TasksEnded",
    }
    # Each worker tells of its own tasks, and of the whole backlog.
    assert (named["backlog"]["Stat"], named["ended"]["Stat"]) == ("Maximum", "Sum")
    assert stuck["EvaluationPeriods"] * named["ended"]["Period"] == 600


def test_each_dead_letter_is_told_of_within_the_hour(alarms: list[dict[str, Any]]) -> None:
    """The alarm of letters that lie there rings for the first alone, and the next may have a day
    left. The age that SQS tells begins anew in the dead-letter queue, so no alarm can use it."""
    [more] = [one for one in alarms if "more-dead-letters" in str(one["AlarmName"])]
    stats = {one["Id"]: one["MetricStat"] for one in more["Metrics"] if "MetricStat" in one}
    queue = {"Name": "QueueName", "Value": {"Fn::GetAtt": ["DeadLetterQueue", "QueueName"]}}

    assert [one["Expression"] for one in more["Metrics"] if one["ReturnData"]] == [
        "DIFF(visible + hidden)"
    ]
    assert {name: one["Metric"]["MetricName"] for name, one in stats.items()} == {
        "visible": "ApproximateNumberOfMessagesVisible",
        "hidden": "ApproximateNumberOfMessagesNotVisible",
    }
    assert all(one["Metric"]["Dimensions"] == [queue] for one in stats.values())
    assert more["EvaluationPeriods"] * stats["visible"]["Period"] <= 3_600


def test_a_figure_that_is_missing_and_workers_that_are_too_few_are_noticed(
    alarms: list[dict[str, Any]],
) -> None:
    watched = {one["MetricName"]: one for one in alarms if "MetricName" in one}
    backlog, running = watched["Backlog"], watched["RunningTaskCount"]

    assert backlog["Statistic"] == "SampleCount"
    assert running["Threshold"] == {"Ref": "MinWorkers"}
    for alarm in (backlog, running):
        assert alarm["TreatMissingData"] == "breaching"
        assert alarm["ComparisonOperator"] == "LessThanThreshold"


@pytest.fixture
def asked(resources: dict[str, Any]) -> list[str]:
    """The command by which ECS asks a worker whether it lives."""
    [container] = resources["WorkerTask"]["Properties"]["ContainerDefinitions"]
    word, *command = container["HealthCheck"]["Command"]
    assert word == "CMD"
    assert {"ContainerPort": 9001} in container["PortMappings"]
    return [sys.executable, *command[1:]]


class Answering(BaseHTTPRequestHandler):
    """Answers a probe with the status of the server."""

    def do_GET(self) -> None:
        assert self.path == "/livez"
        server: Any = self.server
        self.send_response(server.status)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.mark.slow
@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_a_worker_with_a_trouble_of_its_own_is_replaced(
    asked: list[str], status: int, code: int
) -> None:
    with HTTPServer(("127.0.0.1", 0), Answering) as server:
        server.status = status  # type: ignore[attr-defined]
        answering = Thread(target=server.handle_request)
        answering.start()
        ended = _probed(asked, server.server_port)
        answering.join()

    assert ended == code


@pytest.mark.slow
def test_a_worker_that_answers_no_probe_is_replaced(asked: list[str]) -> None:
    """One whose loop stands still takes the connection, and says nothing."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        told = [part.replace("timeout=4", "timeout=0.1") for part in asked]
        assert _probed(told, silent.getsockname()[1]) == 1
    assert told != asked


def _probed(command: list[str], port: int) -> int:
    here = [part.replace("9001", str(port)) for part in command]
    return subprocess.run(here, stderr=subprocess.DEVNULL, check=False).returncode


def test_calls_get_what_fargate_gives_a_task_that_it_stops(
    template: dict[str, Any], resources: dict[str, Any]
) -> None:
    """The rest is for settling what was answered, and for giving back what was not."""
    [container] = resources["WorkerTask"]["Properties"]["ContainerDefinitions"]
    grace = template["Parameters"]["ShutdownGrace"]
    told = [one for one in container["Environment"] if one.get("Name") == VARIABLE]

    assert container["StopTimeout"] == 120
    assert told == [{"Name": VARIABLE, "Value": {"Ref": "ShutdownGrace"}}]
    assert 100 <= grace["Default"] <= grace["MaxValue"] <= container["StopTimeout"] - 10


def test_a_worker_may_protect_its_own_task(resources: dict[str, Any]) -> None:
    policies = {
        one["PolicyName"]: one["PolicyDocument"]["Statement"]
        for one in resources["WorkerRole"]["Properties"]["Policies"]
    }
    [statement] = policies["protection"]
    cluster = resources["Cluster"]["Properties"]["ClusterName"]["Fn::Sub"]

    assert statement["Action"] == ["ecs:GetTaskProtection", "ecs:UpdateTaskProtection"]
    assert statement["Resource"]["Fn::Sub"].endswith(f":task/{cluster}/*")


@pytest.mark.parametrize(
    ("told", "is_protected"),
    [
        ({"ECS_AGENT_URI": "http://169.254.170.2/api/one"}, True),
        ({}, False),
        # Each call ends within the grace anyway.
        (
            {
                "ECS_AGENT_URI": "http://169.254.170.2/api/one",
                "CONVEYOR_GATEWAY_TIMEOUT": "60",
                "CONVEYOR_SHUTDOWN_GRACE": "105",
            },
            False,
        ),
    ],
)
def test_a_worker_on_ecs_protects_its_task_where_a_call_may_outlast_the_grace(
    told: dict[str, str], is_protected: bool
) -> None:
    clock = FakeClock()
    gateway = WatchedGateway(FakeGateway(clock, retry_after_cap=1.0), clock)
    worker = idle_worker(World(slots=1, duration=lambda _delivery: 0.0))
    settings = load(told, production=True, role="worker")

    assert (_protection(gateway, worker, settings, clock) is not None) is is_protected


def test_events_can_leave_for_any_receiver(resources: dict[str, Any]) -> None:
    """From both roles: an api tests receivers."""
    groups = {
        group["Ref"]
        for service in ("ApiService", "WorkerService")
        for group in resources[service]["Properties"]["NetworkConfiguration"][
            "AwsvpcConfiguration"
        ]["SecurityGroups"]
    }
    assert groups == {"TaskGroup"}
    rules = resources["TaskGroup"]["Properties"]["SecurityGroupEgress"]
    assert all(rule["IpProtocol"] == "-1" for rule in rules)
    assert {rule.get("CidrIp", rule.get("CidrIpv6")) for rule in rules} == {"0.0.0.0/0", "::/0"}


def test_there_is_always_a_worker_to_tell_what_waits(template: dict[str, Any]) -> None:
    """Without one nothing is counted, nor is there anything to divide by: none would ever come."""
    assert template["Parameters"]["MinWorkers"]["MinValue"] >= 1


def test_a_worker_is_asked_for_as_many_calls_as_it_has_slots(template: dict[str, Any]) -> None:
    parameters = template["Parameters"]

    assert parameters["CallsPerWorker"]["Default"] == parameters["SlotsPerWorker"]["Default"]


def test_the_age_of_events_is_noticed_where_no_worker_tells_it(
    alarms: list[dict[str, Any]],
) -> None:
    [age] = [one for one in alarms if one.get("MetricName") == "WebhooksOldest"]

    assert age["TreatMissingData"] == "breaching"


def test_every_alarm_is_in_the_readme_with_what_it_means_and_what_to_do(
    alarms: list[dict[str, Any]],
) -> None:
    named = [one["AlarmName"]["Fn::Sub"].replace(ENVIRONMENT, "…") for one in alarms]
    row = re.compile(r"^\| `(conveyor-…-[a-z-]+)` \| [^|]+ \| [^|]+ \|$", re.MULTILINE)

    assert sorted(row.findall(RUNBOOK.read_text())) == sorted(named)


def test_answers_5xx_are_noticed_whoever_gives_them(alarms: list[dict[str, Any]]) -> None:
    """The balancer counts apart those that it gives itself, as where an api hung up on it."""
    watched = {one.get("MetricName") for one in alarms}

    assert watched >= {"HTTPCode_Target_5XX_Count", "HTTPCode_ELB_5XX_Count"}
