"""The dashboards: each metric that they name exists, and each that matters is shown."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from reference import dashboards, pages

from conveyor.engine.telemetry import COUNTER, GAUGE, HISTOGRAM, METRICS

TEMPLATE = Path(__file__).parents[2] / "scripts" / "deploy" / "template.yaml"
OBJECTIVES = TEMPLATE.parents[2] / "docs" / "objectives.md"
SUFFIXES = {COUNTER: "_total", GAUGE: "", HISTOGRAM: "_bucket"}


@pytest.mark.parametrize("path", pages.DASHBOARDS, ids=lambda path: path.name)
def test_the_files_are_those_that_the_script_writes(path: Path) -> None:
    assert path.read_text() == pages.DASHBOARDS[path](), "run: scripts/docs"


# -- Grafana --


@pytest.fixture(scope="module")
def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(dashboards.grafana())["panels"]
    return found


def test_every_metric_is_queried_by_its_name_and_labels(panels: list[dict[str, Any]]) -> None:
    shown = set()
    for panel in panels:
        for target in panel["targets"]:
            [queried] = re.findall(r"\bconveyor_\w+", target["expr"])
            [name] = [
                name
                for name, one in METRICS.items()
                if f"conveyor_{name}{SUFFIXES[one.kind]}" == queried
            ]
            by = re.search(r"by \(([^)]*)\)", target["expr"])
            labels = set(by[1].split(", ")) if by else set()
            assert labels - {"le"} == METRICS[name].labels.keys()
            assert ("le" in labels) is (METRICS[name].kind == HISTOGRAM)
            shown.add(name)

    assert shown == METRICS.keys()


def test_panels_do_not_overlap(panels: list[dict[str, Any]]) -> None:
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}

    assert len(places) == len(panels) == len({panel["id"] for panel in panels})
    assert all(x + panels[0]["gridPos"]["w"] <= dashboards.COLUMNS for x, _ in places)


# -- CloudWatch --


@pytest.fixture(scope="module")
def resources() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(TEMPLATE.read_text())["Resources"]
    return found


@pytest.fixture(scope="module")
def widgets() -> list[dict[str, Any]]:
    [made] = json.loads(dashboards.cloudwatch())["Resources"].values()
    found: list[dict[str, Any]] = json.loads(made["Properties"]["DashboardBody"]["Fn::Sub"])[
        "widgets"
    ]
    return found


def watched(resources: dict[str, Any]) -> set[tuple[str, str]]:
    """Every metric that an alarm of the template looks at, and every one that a filter makes."""
    found = set()
    for one in resources.values():
        properties = one.get("Properties", {})
        metrics = [properties] if "MetricName" in properties else []
        metrics += [
            part["MetricStat"]["Metric"]
            for part in properties.get("Metrics", ())
            if "MetricStat" in part
        ]
        for metric in properties.get("MetricTransformations", ()):
            metrics.append({**metric, "Namespace": metric["MetricNamespace"]})
        for metric in metrics:
            space = metric["Namespace"]
            text = space if isinstance(space, str) else space["Fn::Sub"]
            found.add((text, metric["MetricName"]))
    return found


@pytest.mark.slow
def test_each_metric_of_the_template_is_a_graph_and_no_other(
    resources: dict[str, Any], widgets: list[dict[str, Any]]
) -> None:
    graphs = [one["properties"] for one in widgets if one["type"] == "metric"]
    shown = {tuple(row[:2]) for graph in graphs for row in graph["metrics"]}

    assert shown == watched(resources)
    assert all(graph["stat"] and graph["title"] for graph in graphs)


def test_each_alarm_is_shown_by_its_name(
    resources: dict[str, Any], widgets: list[dict[str, Any]]
) -> None:
    names = {
        one["Properties"]["AlarmName"]["Fn::Sub"]
        for one in resources.values()
        if one["Type"] == "AWS::CloudWatch::Alarm"
    }
    [shown] = [one["properties"]["alarms"] for one in widgets if one["type"] == "alarm"]

    assert {arn.rpartition(":")[2] for arn in shown} == names


def test_a_graph_has_the_threshold_of_its_alarm(widgets: list[dict[str, Any]]) -> None:
    [age] = [one["properties"] for one in widgets if one["properties"]["title"] == "control-age"]

    assert age["annotations"]["horizontal"] == [{"label": "alarm", "value": 900}]
    assert age["metrics"] == [
        [
            "AWS/SQS",
            "ApproximateAgeOfOldestMessage",
            "QueueName",
            "conveyor-${Environment}-control",
        ]
    ]


@pytest.mark.slow
def test_its_stack_asks_for_what_the_fleet_s_stack_tells() -> None:
    made = json.loads(dashboards.cloudwatch())
    outputs = yaml.safe_load(TEMPLATE.read_text())["Outputs"].keys()
    body = json.dumps(made["Resources"])
    told = {
        match[1]
        for name, one in made["Parameters"].items()
        if (match := re.search(r"output (\w+)", one.get("Description", "")))
        and f"${{{name}}}" in body
    }

    assert told == {"TableName", "LoadBalancerName", "TargetGroupName"}
    assert told <= outputs


# -- objectives --


def test_each_objective_names_an_alarm_and_each_alarm_guards_one(
    resources: dict[str, Any],
) -> None:
    alarms = {
        one["Properties"]["AlarmName"]["Fn::Sub"].replace("${Environment}", "…")
        for one in resources.values()
        if one["Type"] == "AWS::CloudWatch::Alarm"
    }
    section = OBJECTIVES.read_text().split("## Service objectives\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    guarding = [set(re.findall(r"`(conveyor-…-[a-z-]+)`", row)) for row in rows]

    assert all(guarding)
    assert set.union(*guarding) == alarms


def test_each_metric_that_an_objective_names_exists() -> None:
    named = re.findall(r"`conveyor_(\w+?)(?:_total)?`", OBJECTIVES.read_text())

    assert named
    assert set(named) <= METRICS.keys()
