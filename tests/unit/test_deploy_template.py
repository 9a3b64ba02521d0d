"""The deployment template makes what `conveyor admin init` makes, and grants what the roles use."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from conveyor.ports.queues import CONTROL_QUEUE, DEAD_LETTER_QUEUE
from conveyor.prod.dynamodb.table import TIME_TO_LIVE, description
from conveyor.prod.s3.lifecycle import lifecycle_rules
from conveyor.prod.sqs.names import attributes, prefix
from conveyor.settings import SETTINGS

TEMPLATE = Path(__file__).parents[2] / "scripts" / "deploy" / "template.yaml"
ENVIRONMENT = "${Environment}"


@pytest.fixture(scope="module")
def template() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(TEMPLATE.read_text())
    return loaded


@pytest.fixture(scope="module")
def resources(template: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = template["Resources"]
    return found


def test_the_linter_has_nothing_to_say() -> None:
    linter = Path(sys.executable).with_name("cfn-lint")
    ended = subprocess.run([linter, TEMPLATE], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "")


def test_the_table_is_the_one_that_init_makes(resources: dict[str, Any]) -> None:
    properties = resources["Table"]["Properties"]
    wanted = description(f"conveyor-{ENVIRONMENT}")
    assert properties["TableName"]["Fn::Sub"] == wanted["TableName"]
    for name in ("BillingMode", "AttributeDefinitions", "KeySchema", "GlobalSecondaryIndexes"):
        assert properties[name] == wanted[name], name
    assert properties["TimeToLiveSpecification"] == {
        "AttributeName": TIME_TO_LIVE,
        "Enabled": True,
    }


def test_the_queues_are_those_that_init_makes(resources: dict[str, Any]) -> None:
    wanted = attributes(dead_letters="the ARN", max_receives=1_000)
    for resource, queue in (
        ("ControlQueue", CONTROL_QUEUE),
        ("DeadLetterQueue", DEAD_LETTER_QUEUE),
    ):
        properties = resources[resource]["Properties"]
        assert properties["QueueName"]["Fn::Sub"] == f"{prefix(ENVIRONMENT)}{queue}"
        assert str(properties["MessageRetentionPeriod"]) == wanted["MessageRetentionPeriod"]
    redrive = resources["ControlQueue"]["Properties"]["RedrivePolicy"]
    assert redrive["maxReceiveCount"] == 1_000
    assert redrive["deadLetterTargetArn"] == {"Fn::GetAtt": ["DeadLetterQueue", "Arn"]}


def test_the_bucket_forgets_as_init_has_it(resources: dict[str, Any]) -> None:
    rules = resources["Bucket"]["Properties"]["LifecycleConfiguration"]["Rules"]
    found = {
        rule["Id"]: (
            rule.get("Prefix", ""),
            rule.get("ExpirationInDays"),
            rule.get("AbortIncompleteMultipartUpload", {}).get("DaysAfterInitiation"),
        )
        for rule in rules
        if rule["Status"] == "Enabled"
    }
    assert found == {
        rule["ID"]: (
            rule["Filter"]["Prefix"],
            rule.get("Expiration", {}).get("Days"),
            rule.get("AbortIncompleteMultipartUpload", {}).get("DaysAfterInitiation"),
        )
        for rule in lifecycle_rules()
    }


def test_both_roles_are_told_the_same_settings_and_all_of_them_exist(
    resources: dict[str, Any],
) -> None:
    known = {setting.variable for setting in SETTINGS}
    told = []
    for resource in ("ApiTask", "WorkerTask"):
        [container] = resources[resource]["Properties"]["ContainerDefinitions"]
        secrets = [one.get("Fn::If", [None, one])[1] for one in container["Secrets"]]
        told.append((container["Environment"], secrets))
        names = {one["Name"] for one in (*container["Environment"], *secrets)}
        assert names <= known, names - known
    assert told[0] == told[1]


def test_no_right_reaches_beyond_the_environment(resources: dict[str, Any]) -> None:
    statements = [
        statement
        for resource in resources.values()
        for document in _policies(resource)
        for statement in document["Statement"]
    ]
    assert len(statements) >= 5
    for statement in statements:
        actions = statement["Action"]
        for action in [actions] if isinstance(actions, str) else actions:
            assert re.fullmatch(r"[a-z0-9]+:[A-Za-z]+", action), action
        assert "'*'" not in repr(statement["Resource"]), statement


def _policies(resource: dict[str, Any]) -> list[dict[str, Any]]:
    properties = resource.get("Properties", {})
    documents = [policy["PolicyDocument"] for policy in properties.get("Policies", [])]
    if "PolicyDocument" in properties:
        documents.append(properties["PolicyDocument"])
    return documents
