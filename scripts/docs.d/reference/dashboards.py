"""The dashboards: scripts/deploy/dashboard.json for CloudWatch, scripts/deploy/grafana.json.

The first is a CloudFormation template, made from the alarms and the metric filters of
template.yaml: each of their metrics is a graph, with the threshold of its alarm. The second shows
every metric of /metrics.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from conveyor.engine.telemetry import COUNTER, GAUGE, HISTOGRAM, METRICS, MetricInfo
from reference.source import ROOT

DEPLOY = ROOT / "scripts" / "deploy"
TEMPLATE = DEPLOY / "template.yaml"

Document = dict[str, Any]

WIDTH, HEIGHT = 8, 6
COLUMNS = 24
QUANTILES = (0.5, 0.95, 0.99)
PARAMETERS = {"Balancer": "${LoadBalancer}", "Targets": "${TargetGroup}"}
"""The parameter that has the name of a resource which AWS names."""
LARGEST = frozenset({"Backlog", "Runnable", "Settlement", "WebhooksOldest"})
"""Figures of which each worker tells the whole, or the worst: they are not added up."""


def cloudwatch() -> str:
    """Return the template of the CloudWatch dashboard."""
    resources = yaml.safe_load(TEMPLATE.read_text(encoding="utf-8"))["Resources"]
    text = {"Type": "String"}
    body = {"widgets": _placed([_alarms(resources), *_graphs(resources), _ended_tasks()])}
    return _text(
        {
            "AWSTemplateFormatVersion": "2010-09-09",
            "Description": "The dashboard of a fleet that template.yaml made. By scripts/docs.",
            "Parameters": {
                "Environment": text,
                "Table": {**text, "Description": "The output TableName of the fleet's stack."},
                "LoadBalancer": {**text, "Description": "Its output LoadBalancerName."},
                "TargetGroup": {**text, "Description": "Its output TargetGroupName."},
            },
            "Resources": {
                "Dashboard": {
                    "Type": "AWS::CloudWatch::Dashboard",
                    "Properties": {
                        "DashboardName": {"Fn::Sub": "conveyor-${Environment}"},
                        "DashboardBody": {"Fn::Sub": json.dumps(body)},
                    },
                }
            },
        }
    )


def _alarms(resources: Mapping[str, Any]) -> Document:
    named = "arn:${AWS::Partition}:cloudwatch:${AWS::Region}:${AWS::AccountId}:alarm:"
    alarms = [named + one["AlarmName"]["Fn::Sub"] for one in _of(resources, "CloudWatch::Alarm")]
    return {"type": "alarm", "properties": {"title": "Alarms", "alarms": alarms}}


def _graphs(resources: Mapping[str, Any]) -> Iterator[Document]:
    """Yield a graph of each alarm that watches one metric, then of all other metrics: those of
    alarms over several, and those of filters."""
    drawn = set()
    for alarm in _of(resources, "CloudWatch::Alarm"):
        if "MetricName" in alarm:
            title = alarm["AlarmName"]["Fn::Sub"].removeprefix("conveyor-${Environment}-")
            yield _graph(title, alarm, resources, threshold=alarm["Threshold"])
            drawn.add(alarm["MetricName"])
    left = [
        {**part["MetricStat"]["Metric"], "Statistic": part["MetricStat"]["Stat"]}
        for alarm in _of(resources, "CloudWatch::Alarm")
        for part in alarm.get("Metrics", ())
        if "MetricStat" in part
    ]
    left += [
        {"Namespace": one["MetricNamespace"], "MetricName": one["MetricName"]}
        for found in _of(resources, "Logs::MetricFilter")
        for one in found["MetricTransformations"]
    ]
    for metric in left:
        name = metric["MetricName"]
        if name not in drawn:
            drawn.add(name)
            chosen = "Maximum" if name in LARGEST else metric.get("Statistic", "Sum")
            yield _graph(name, {**metric, "Statistic": chosen}, resources)


def _graph(
    title: str, metric: Mapping[str, Any], resources: Mapping[str, Any], threshold: object = None
) -> Document:
    row = [_plain(metric["Namespace"], resources), metric["MetricName"]]
    for dimension in metric.get("Dimensions", ()):
        row += [dimension["Name"], _plain(dimension["Value"], resources)]
    statistic = metric.get("ExtendedStatistic", metric.get("Statistic"))
    properties: Document = {
        "title": title,
        "region": "${AWS::Region}",
        # An alarm that counts samples watches a figure; the graph shows the figure.
        "stat": "Maximum" if statistic == "SampleCount" else statistic,
        "period": 60,
        "metrics": [row],
    }
    if isinstance(threshold, int | float) and statistic != "SampleCount":
        line = {"label": "alarm", "value": threshold}
        properties["annotations"] = {"horizontal": [line]}
    return {"type": "metric", "properties": properties}


def _ended_tasks() -> Document:
    """Build the graph of the duration of tasks, from their log lines."""
    query = (
        "SOURCE '/conveyor/${Environment}' | filter message = 'task ended'"
        " | stats pct(ms, 50), pct(ms, 95), pct(ms, 99) by bin(5m)"
    )
    shown = {"title": "Milliseconds of the last attempt of ended tasks", "view": "timeSeries"}
    return {"type": "log", "properties": {**shown, "region": "${AWS::Region}", "query": query}}


def _of(resources: Mapping[str, Any], kind: str) -> list[Document]:
    return [one["Properties"] for one in resources.values() if one["Type"] == f"AWS::{kind}"]


def _plain(value: Any, resources: Mapping[str, Any]) -> str:
    """Write a value of template.yaml as text for the other stack, which does not know its
    resources: by their names, or by a parameter."""
    if isinstance(value, str):
        return value
    if "Fn::Sub" in value:
        return str(value["Fn::Sub"])
    if "Fn::If" in value:  # the table, restored or not
        return "${Table}"
    name = value.get("Ref") or value["Fn::GetAtt"][0]
    if name in PARAMETERS:
        return PARAMETERS[name]
    properties = resources[name]["Properties"]
    for named in ("QueueName", "ClusterName", "ServiceName"):
        if named in properties:
            return _plain(properties[named], resources)
    raise ValueError(f"{name} has no name that another stack could know")


def _placed(widgets: list[Document]) -> list[Document]:
    """Lay widgets out in rows."""
    across = COLUMNS // WIDTH
    return [
        {
            **widget,
            "x": at % across * WIDTH,
            "y": at // across * HEIGHT,
            "width": WIDTH,
            "height": HEIGHT,
        }
        for at, widget in enumerate(widgets)
    ]


# -- Grafana --


def grafana() -> str:
    """Return the dashboard of Grafana over Prometheus."""
    panels = [
        {
            "id": number,
            "type": "timeseries",
            "title": f"conveyor_{name}",
            "description": one.help,
            "datasource": {"type": "prometheus", "uid": "${source}"},
            "gridPos": {
                "h": HEIGHT,
                "w": WIDTH,
                "x": (number - 1) % (COLUMNS // WIDTH) * WIDTH,
                "y": (number - 1) // (COLUMNS // WIDTH) * HEIGHT,
            },
            "fieldConfig": {"defaults": {"unit": _unit(name, one)}, "overrides": []},
            "targets": list(_targets(name, one)),
        }
        for number, (name, one) in enumerate(METRICS.items(), start=1)
    ]
    source = {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    return _text(
        {
            "title": "Conveyor",
            "uid": "conveyor",
            "schemaVersion": 39,
            "tags": ["conveyor"],
            "time": {"from": "now-3h", "to": "now"},
            "refresh": "30s",
            "templating": {"list": [source]},
            "panels": panels,
        }
    )


def _targets(name: str, one: MetricInfo) -> Iterator[Document]:
    """Yield the queries of a metric: rates of a counter, quantiles of a histogram, and of a gauge
    the largest of all processes."""
    labels = ", ".join(one.labels)
    by = f" by ({labels})" if labels else ""
    legend = " ".join(f"{{{{{label}}}}}" for label in one.labels)
    if one.kind == COUNTER:
        yield _target(f"sum{by} (rate(conveyor_{name}_total[$__rate_interval]))", legend)
    elif one.kind == GAUGE:
        yield _target(f"max{by} (conveyor_{name})", legend)
    else:
        within = f" by ({', '.join(['le', *one.labels])})"
        for share in QUANTILES:
            rate = f"sum{within} (rate(conveyor_{name}_bucket[$__rate_interval]))"
            query = f"histogram_quantile({share}, {rate})"
            yield _target(query, f"{share:.0%} {legend}".strip(), exemplar=True)


def _target(query: str, legend: str, *, exemplar: bool = False) -> Document:
    return {"expr": query, "legendFormat": legend or "all", "exemplar": exemplar}


def _unit(name: str, one: MetricInfo) -> str:
    if one.kind == COUNTER:
        return "ops"
    if one.kind == HISTOGRAM or name.endswith("_seconds"):
        return "s"
    return "bytes" if name.endswith("_bytes") else "short"


def _text(document: Document) -> str:
    return json.dumps(document, indent=1) + "\n"
