"""The deployment template makes what `conveyor admin init` makes, and grants what the roles use."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import yaml

from conveyor.ports.queues import CONTROL_QUEUE, DEAD_LETTER_QUEUE
from conveyor.prod.aws.calls import Answer, Parameters
from conveyor.prod.dynamodb.client import Table
from conveyor.prod.dynamodb.schema import TIME_TO_LIVE, table_parameters
from conveyor.prod.s3.blobs import HEAD_MEMORY
from conveyor.prod.s3.bucket import lifecycle_rules
from conveyor.prod.sealing import open_data_key
from conveyor.prod.sqs.registry import attributes, prefix
from conveyor.records.blob_keys import template_key
from conveyor.settings import SETTINGS, load
from conveyor.settings.validators import name as environment_name
from conveyor.testing.clock import FakeClock

TEMPLATE = Path(__file__).parents[2] / "scripts" / "deploy" / "template.yaml"
RUNBOOK = TEMPLATE.parents[2] / "docs" / "operations.md"
ENVIRONMENT = "${Environment}"
CONTEXT = {"conveyor:environment": "env"}
CALLBACKS = {"states:SendTaskFailure", "states:SendTaskHeartbeat", "states:SendTaskSuccess"}


@pytest.fixture(scope="module")
def template() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(TEMPLATE.read_text())
    return loaded


@pytest.fixture(scope="module")
def resources(template: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = template["Resources"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["template.yaml", "dashboard.json"])
def test_the_linter_has_nothing_to_say(name: str) -> None:
    linter = Path(sys.executable).with_name("cfn-lint")
    linted = TEMPLATE.with_name(name)
    ended = subprocess.run([linter, linted], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "")


def test_the_table_is_the_one_that_init_makes(resources: dict[str, Any]) -> None:
    properties = resources["Table"]["Properties"]
    wanted = table_parameters(f"conveyor-{ENVIRONMENT}")
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
            rule.get("NoncurrentVersionExpiration", {}).get("NoncurrentDays"),
            rule.get("ExpiredObjectDeleteMarker"),
        )
        for rule in rules
        if rule["Status"] == "Enabled"
    }
    assert found == {
        rule["ID"]: (
            rule["Filter"]["Prefix"],
            rule.get("Expiration", {}).get("Days"),
            rule.get("AbortIncompleteMultipartUpload", {}).get("DaysAfterInitiation"),
            rule.get("NoncurrentVersionExpiration", {}).get("NoncurrentDays"),
            rule.get("Expiration", {}).get("ExpiredObjectDeleteMarker"),
        )
        for rule in lifecycle_rules()
    }


def test_no_rule_of_the_bucket_takes_the_tasks_of_a_schedule(resources: dict[str, Any]) -> None:
    rules = resources["Bucket"]["Properties"]["LifecycleConfiguration"]["Rules"]
    key = template_key("JOB", "LIST", 0)
    taken = [
        rule["Id"]
        for rule in rules
        if key.startswith(rule.get("Prefix", "")) and "ExpirationInDays" in rule
    ]
    assert taken == []


def test_each_role_is_told_what_it_reads_and_no_more(resources: dict[str, Any]) -> None:
    """Settings of both roles have one value. The URL of a scraping API may have a
    key in it."""
    known = {setting.variable for setting in SETTINGS}
    told = []
    for resource in ("ApiTask", "WorkerTask"):
        [container] = resources[resource]["Properties"]["ContainerDefinitions"]
        entries = [*_given(container["Secrets"]), *_given(container["Environment"])]
        told.append({one["Name"]: one for one in entries})
    api, worker = told
    assert api.keys() | worker.keys() <= known
    assert api.keys() - worker.keys() == {
        "CONVEYOR_API_KEYS",
        "CONVEYOR_DASHBOARD",
        "CONVEYOR_HOST",
        "CONVEYOR_MAX_INPUT_ROWS",
        "CONVEYOR_OPERATOR_KEYS",
        "CONVEYOR_PORT",
        "CONVEYOR_RATE_LIMIT",
        "CONVEYOR_TASK_SHARD_COUNT",
    }
    assert "CONVEYOR_PUBLIC_URL" in worker
    assert worker.keys() - api.keys() == {
        "CONVEYOR_GATEWAY",
        "CONVEYOR_GATEWAY_PROXY",
        "CONVEYOR_GATEWAY_TIMEOUT",
        "CONVEYOR_PACK_BODIES",
        "CONVEYOR_SHUTDOWN_GRACE",
        "CONVEYOR_WORKERS",
    }
    assert [name for name in api.keys() & worker.keys() if api[name] != worker[name]] == []


DECIDED = {
    "CONVEYOR_BUCKET",
    "CONVEYOR_HOST",
    "CONVEYOR_METRICS_HOST",
    "CONVEYOR_METRICS_PORT",
    "CONVEYOR_PORT",
    "CONVEYOR_REGION",
}
"""Resources that the template makes, and that its own network needs."""


@pytest.mark.parametrize("role", ["Api", "Worker"])
def test_every_setting_can_be_set(
    template: dict[str, Any], resources: dict[str, Any], role: str
) -> None:
    """By a parameter, or in the one file for all the rest; ECS lets the former win."""
    [container] = resources[f"{role}Task"]["Properties"]["ContainerDefinitions"]
    given = {
        one["Name"]: one.get("Value", one.get("ValueFrom"))
        for one in (*_given(container["Environment"]), *_given(container["Secrets"]))
    }
    parameters = template["Parameters"].keys()
    by_parameter = {
        name
        for name, value in given.items()
        if {one["Ref"] for one in _found(value, into_conditions=True) if _is_reference(one)}
        & parameters
        or "HasRedis" in repr(value)
    }
    assert given.keys() - by_parameter <= DECIDED
    in_the_file = {setting.variable for setting in SETTINGS} - given.keys()
    assert container["EnvironmentFiles"] == {
        "Fn::If": [
            "HasSettingsFile",
            [{"Type": "s3", "Value": {"Ref": "SettingsFileArn"}}],
            {"Ref": "AWS::NoValue"},
        ]
    }
    secrets = {setting.variable for setting in SETTINGS if setting.secret}
    # A file in a bucket is no place for a secret; the proxy is the worker's alone.
    assert in_the_file & secrets == ({"CONVEYOR_GATEWAY_PROXY"} if role == "Api" else set())


def _is_reference(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("Ref"), str)


def test_the_image_has_what_a_setting_may_ask_for() -> None:
    """Else a role that is told of a collector does not start, and nobody can ask for robots.txt."""
    project = tomllib.loads((TEMPLATE.parents[2] / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"].keys()
    [installed] = re.findall(r"'\.\[([a-z,]+)\]'", TEMPLATE.with_name("Dockerfile").read_text())
    assert set(installed.split(",")) == extras - {"dev", "xlsx"}


@pytest.mark.parametrize("role", ["Api", "Worker"])
def test_no_number_is_taken_that_a_role_refuses(
    template: dict[str, Any], resources: dict[str, Any], role: str
) -> None:
    [container] = resources[f"{role}Task"]["Properties"]["ContainerDefinitions"]
    checked = 0
    for one in _given(container["Environment"]):
        value: Any = one.get("Value")
        parameter = template["Parameters"].get(value["Ref"], {}) if _is_reference(value) else {}
        if parameter.get("Type") == "Number":
            most = parameter.get("MaxValue", 1_000_000_000)
            for number in (parameter["MinValue"], most):
                load({one["Name"]: str(number)}, production=True)
            checked += 1
    assert checked >= 4


def test_what_starts_a_role_may_read_its_settings(resources: dict[str, Any]) -> None:
    policy = resources["SettingsFile"]
    read, located = policy["Properties"]["PolicyDocument"]["Statement"]

    assert policy["Condition"] == "HasSettingsFile"
    assert (_actions(read), read["Resource"]) == ({"s3:GetObject"}, {"Ref": "SettingsFileArn"})
    assert _actions(located) == {"s3:GetBucketLocation"}
    attached = {"Fn::If": ["HasSettingsFile", {"Ref": "SettingsFile"}, {"Ref": "AWS::NoValue"}]}
    for role in ("Api", "Worker"):
        assert attached in resources[f"{role}ExecutionRole"]["Properties"]["ManagedPolicyArns"]


@pytest.mark.parametrize(
    ("arn", "is_taken"),
    [
        ("", True),
        ("arn:aws:s3:::settings/production.env", True),
        ("arn:aws:s3:::settings/production.txt", False),
        ("s3://settings/production.env", False),
    ],
)
def test_a_file_of_settings_is_named_as_ecs_wants_it(
    template: dict[str, Any], arn: str, is_taken: bool
) -> None:
    pattern = template["Parameters"]["SettingsFileArn"]["AllowedPattern"]
    assert (re.fullmatch(pattern, arn) is not None) is is_taken


FARGATE_SIZES = {
    "256": (512, 2_048),
    "512": (1_024, 4_096),
    "1024": (2_048, 8_192),
    "2048": (4_096, 16_384),
}
"""The least and the most MiB of memory that Fargate has for so many units of CPU."""


def test_every_size_of_a_worker_has_room_for_its_slots(
    template: dict[str, Any], resources: dict[str, Any]
) -> None:
    """A task takes 3.2 ms of CPU at most (`scripts/bench aws_calls --only delays`), a call 2.4 s.
    Heads of bodies take no more than half of the memory, however many slots have one."""
    slots = template["Parameters"]["SlotsPerWorker"]["Default"]
    worker = resources["WorkerTask"]["Properties"]
    sizes = template["Mappings"]["WorkerSizes"]

    assert list(sizes) == template["Parameters"]["WorkerSize"]["AllowedValues"]
    for what in ("Cpu", "Memory"):
        assert worker[what] == {"Fn::FindInMap": ["WorkerSizes", {"Ref": "WorkerSize"}, what]}
    bears = {name: 0.6 * int(size["Cpu"]) / 1024 / 0.0032 * 2.4 for name, size in sizes.items()}
    assert bears.pop("quarter") >= 100
    assert min(bears.values()) >= slots
    for size in sizes.values():
        assert int(size["Memory"]) * 1024 * 1024 / 2 >= HEAD_MEMORY
        least, most = FARGATE_SIZES[size["Cpu"]]
        assert least <= int(size["Memory"]) <= most


def test_a_file_of_a_million_tasks_is_taken(template: dict[str, Any]) -> None:
    assert template["Parameters"]["MaxInputRows"]["Default"] == 1_000_000


def test_no_worker_can_have_the_keys_of_callers(resources: dict[str, Any]) -> None:
    """Neither it nor what starts it: a role that starts both could be told to hand it over."""
    refers = {
        name
        for name, resource in resources.items()
        for found in _found(resource)
        if found == {"Ref": "ApiKeysSecretArn"}
    }
    # An administrator lists schedules by the hashes of keys.
    assert refers == {"ApiExecutionRole", "ApiTask", "AdminTask"}
    for service in ("Api", "Worker"):
        started_by = resources[f"{service}Task"]["Properties"]["ExecutionRoleArn"]
        assert started_by == {"Fn::GetAtt": [f"{service}ExecutionRole", "Arn"]}


def test_workers_can_have_another_image_first(
    template: dict[str, Any], resources: dict[str, Any]
) -> None:
    """Workers are deployed before apis: an image of both alone would change both at once."""
    image = {
        resource: resources[resource]["Properties"]["ContainerDefinitions"][0]["Image"]
        for resource in ("ApiTask", "WorkerTask")
    }
    assert image == {
        "ApiTask": {"Fn::If": ["HasApiImage", {"Ref": "ApiImage"}, {"Ref": "Image"}]},
        "WorkerTask": {"Ref": "Image"},
    }
    assert template["Parameters"]["ApiImage"]["Default"] == ""
    assert template["Conditions"]["HasApiImage"] == {
        "Fn::Not": [{"Fn::Equals": [{"Ref": "ApiImage"}, ""]}]
    }


def test_services_have_the_names_that_they_are_stopped_by(resources: dict[str, Any]) -> None:
    readme = RUNBOOK.read_text()
    cluster = resources["Cluster"]["Properties"]["ClusterName"]["Fn::Sub"]
    assert f"--cluster {cluster.replace(ENVIRONMENT, 'production')} " in readme
    for service in ("Api", "Worker"):
        name = resources[f"{service}Service"]["Properties"]["ServiceName"]
        assert f"--service {name} " in readme
        scaled = resources[f"{service}Scaling"]["Properties"]
        assert f"--scalable-dimension {scaled['ScalableDimension']}" in readme
        assert f"scaling {name} true" in readme
        assert f"scaling {name} false" in readme
    assert '--resource-id "service/conveyor-production/$1"' in readme


def test_no_right_reaches_beyond_the_environment(resources: dict[str, Any]) -> None:
    statements = [
        statement
        for resource in resources.values()
        for document in _policies(resource)
        for statement in _given(document["Statement"])
    ]
    assert len(statements) >= 5
    for statement in statements:
        for action in _actions(statement):
            assert re.fullmatch(r"[a-z0-9]+:[A-Za-z]+", action), action
        # A task token names no resource that a policy could.
        if not _actions(statement) <= CALLBACKS:
            assert "'*'" not in repr(statement["Resource"]), statement


QUEUES = ("control", "dead-letter", "run-01K9ZQ3V5N8M2X7C4B6D1F0G9H-1")


@pytest.mark.parametrize("other", ["production-eu", "production-control", "production-runs", "p"])
@pytest.mark.parametrize("role", ["Api", "Worker"])
def test_no_right_to_queues_covers_an_environment_that_is_named_alike(
    resources: dict[str, Any], role: str, other: str
) -> None:
    allowed = {
        pattern.replace(ENVIRONMENT, "production")
        for document in _policies(resources[f"{role}Role"])
        for statement in _given(document["Statement"])
        if any(action.startswith("sqs:") for action in _actions(statement))
        for pattern in _queue_patterns(resources, statement)
    }
    own = [f"{prefix('production')}{queue}" for queue in QUEUES]
    others = [f"{prefix(other)}{queue}" for queue in QUEUES]

    assert environment_name(other) is None
    assert all(any(fnmatchcase(name, one) for one in allowed) for name in own)
    assert not [name for name in others for one in allowed if fnmatchcase(name, one)]


def _queue_patterns(resources: dict[str, Any], statement: dict[str, Any]) -> list[str]:
    found = []
    for resource in statement["Resource"]:
        if "Fn::GetAtt" in resource:
            name = resources[resource["Fn::GetAtt"][0]]["Properties"]["QueueName"]["Fn::Sub"]
        else:
            name = resource["Fn::Sub"].rpartition(":")[2]
        found.append(name)
    return found


@pytest.mark.parametrize(
    ("environment", "is_taken"),
    [
        ("production", True),
        ("production-eu", True),
        ("run", True),
        ("run-a", True),
        ("prun-a", True),
        ("production-run", False),
        ("production-run-2", False),
        ("Production", False),
    ],
)
def test_no_environment_is_named_as_queues_of_another_s_runs(
    template: dict[str, Any], environment: str, is_taken: bool
) -> None:
    pattern = template["Parameters"]["Environment"]["AllowedPattern"]

    assert (re.fullmatch(pattern, environment) is not None) is is_taken
    assert (environment_name(environment) is None) is is_taken


def test_an_api_receives_dead_letters_alone_and_only_for_operators(
    resources: dict[str, Any],
) -> None:
    [document] = _policies(resources["ApiRole"])
    received = [
        statement
        for statement in _given(document["Statement"])
        if "sqs:ReceiveMessage" in _actions(statement)
    ]
    [conditional] = [one["Fn::If"] for one in document["Statement"] if "Fn::If" in one]

    assert (conditional[0], conditional[2]) == ("HasOperators", {"Ref": "AWS::NoValue"})
    assert received == [conditional[1]]
    assert _actions(conditional[1]) == {
        "sqs:ChangeMessageVisibility",
        "sqs:DeleteMessage",
        "sqs:ReceiveMessage",
    }
    assert conditional[1]["Resource"] == [{"Fn::GetAtt": ["DeadLetterQueue", "Arn"]}]


def test_the_worker_alone_calls_back(resources: dict[str, Any]) -> None:
    granted = {
        name: {action for document in _policies(one) for action in _allowed(document)}
        for name, one in resources.items()
    }
    assert granted["WorkerRole"] >= CALLBACKS
    # An administrator tries the calls with a token that nobody waits for.
    called_back = [name for name, actions in granted.items() if actions & CALLBACKS]
    assert called_back == ["WorkerRole", "AdminRole"]


async def test_both_roles_may_do_with_the_kms_key_what_they_do_and_no_more(
    template: dict[str, Any], resources: dict[str, Any]
) -> None:
    """The uses of a key are taken from the code: it is made, read, and moved to another."""
    calls = RecordsCalls()
    for kms_key in ("one", "other"):
        await open_data_key(calls, calls.table(), kms_key=kms_key, environment="env")
    policy = resources["CallersKeys"]
    statement, former = _given(policy["Properties"]["PolicyDocument"]["Statement"])

    assert _actions(statement) == {f"kms:{_camel(operation)}" for operation, _ in calls.made}
    assert statement["Resource"] == {"Ref": "KmsKeyArn"}
    assert all(parameters["EncryptionContext"] == CONTEXT for _, parameters in calls.made)
    assert statement["Condition"] == {
        "StringEquals": {
            f"kms:EncryptionContext:{name}": {"Ref": "Environment"} for name in CONTEXT
        }
    }
    [used] = {parameters["KeyId"] for operation, parameters in calls.made if operation == "decrypt"}
    assert used == "one"
    assert (_actions(former), former["Resource"]) == ({"kms:Decrypt"}, {"Ref": "FormerKmsKeyArn"})
    assert former["Condition"] == statement["Condition"]
    # Without a key there is neither the right nor the setting.
    assert template["Parameters"]["KmsKeyArn"]["Default"] == ""
    assert policy["Condition"] == "HasKmsKey"
    attached = {"Fn::If": ["HasKmsKey", {"Ref": "CallersKeys"}, {"Ref": "AWS::NoValue"}]}
    for resource in ("Api", "Worker"):
        assert attached in resources[f"{resource}Role"]["Properties"]["ManagedPolicyArns"]
        [container] = resources[f"{resource}Task"]["Properties"]["ContainerDefinitions"]
        setting = {"Name": "CONVEYOR_KMS_KEY", "Value": {"Ref": "KmsKeyArn"}}
        wanted = ["HasKmsKey", setting, {"Ref": "AWS::NoValue"}]
        assert {"Fn::If": wanted} in container["Environment"]


@pytest.mark.parametrize("parameter", ["KmsKeyArn", "FormerKmsKeyArn"])
@pytest.mark.parametrize(
    ("arn", "is_taken"),
    [
        ("", True),
        ("arn:aws:kms:eu-west-1:123456789012:key/mrk-1", True),
        # A policy that names an alias grants nothing.
        ("arn:aws:kms:eu-west-1:123456789012:alias/callers", False),
        ("mrk-1", False),
    ],
)
def test_a_kms_key_is_given_by_its_own_arn(
    template: dict[str, Any], parameter: str, arn: str, is_taken: bool
) -> None:
    pattern = template["Parameters"][parameter]["AllowedPattern"]
    assert (re.fullmatch(pattern, arn) is not None) is is_taken


class RecordsCalls:
    """KMS and a table of one item, as much of them as a data key needs. `made` are KMS's calls."""

    def __init__(self) -> None:
        self.made: list[tuple[str, Parameters]] = []
        self._item: dict[str, Any] = {}

    def table(self) -> Table:
        return Table(self, "table", FakeClock())

    async def call(self, service: str, operation: str, parameters: Parameters) -> Answer:
        if service == "kms":
            self.made.append((operation, parameters))
            return {"CiphertextBlob": b"sealed", "Plaintext": b"key"}
        if operation == "put_item":
            self._item = parameters["Item"]
        values = parameters.get("ExpressionAttributeValues", {})
        if operation == "update_item":
            self._item |= {name: values[f":{name}"] for name in ("kms_key", "sealed")}
            return {"Attributes": self._item}
        return {"Item": self._item} if self._item else {}

    def presign(self, operation: str, parameters: Parameters, *, seconds: int) -> str:
        raise AssertionError("no link is needed")


def _camel(operation: str) -> str:
    return "".join(word.capitalize() for word in operation.split("_"))


def _given(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Entries of a list, those that hang on a condition as where it holds."""
    return [one.get("Fn::If", [None, one])[1] for one in entries]


def _allowed(document: dict[str, Any]) -> set[str]:
    return {action for statement in _given(document["Statement"]) for action in _actions(statement)}


def _actions(statement: dict[str, Any]) -> set[str]:
    actions = statement["Action"]
    return {actions} if isinstance(actions, str) else set(actions)


def _policies(resource: dict[str, Any]) -> list[dict[str, Any]]:
    properties = resource.get("Properties", {})
    documents = [policy["PolicyDocument"] for policy in properties.get("Policies", [])]
    if "PolicyDocument" in properties:
        documents.append(properties["PolicyDocument"])
    return documents


def test_a_restored_table_takes_the_place_of_the_own_one_everywhere(
    resources: dict[str, Any],
) -> None:
    """Whoever says `Ref: Table` alone stays with the table that was given up."""
    refers = [
        name
        for name, resource in resources.items()
        for found in _found(resource)
        if found in ({"Ref": "Table"}, {"Fn::GetAtt": ["Table", "Arn"]})
    ]
    assert refers == []
    used = {
        name
        for name, resource in resources.items()
        for found in _found(resource, into_conditions=True)
        if found == "HasRestoredTable"
    }
    assert used == {
        "RecordsAndBlobs",
        "AdminRole",
        "AdminTask",
        "ApiTask",
        "WorkerTask",
        "ThrottlesAlarm",
    }


def test_metrics_are_collected_from_where_a_parameter_says(resources: dict[str, Any]) -> None:
    rules = _given(resources["TaskGroup"]["Properties"]["SecurityGroupIngress"])
    [rule] = [rule for rule in rules if rule.get("CidrIp")]

    assert (rule["FromPort"], rule["ToPort"], rule["CidrIp"]) == (
        9001,
        9001,
        {"Ref": "MetricsCidr"},
    )


def test_bodies_and_rows_go_past_the_nat(
    template: dict[str, Any], resources: dict[str, Any]
) -> None:
    for name, service in (("BlobsEndpoint", "s3"), ("RowsEndpoint", "dynamodb")):
        endpoint = resources[name]
        assert endpoint["Condition"] == "HasRouteTables"
        assert endpoint["Properties"] == {
            "VpcId": {"Ref": "Vpc"},
            "VpcEndpointType": "Gateway",
            "ServiceName": {"Fn::Sub": f"com.amazonaws.${{AWS::Region}}.{service}"},
            "RouteTableIds": {"Ref": "PrivateRouteTables"},
        }
    assert template["Parameters"]["PrivateRouteTables"]["Default"] == ""


def test_a_table_is_warm_as_told_and_is_not_deleted_by_mistake(
    template: dict[str, Any], resources: dict[str, Any]
) -> None:
    table = resources["Table"]["Properties"]
    attributes = resources["Balancer"]["Properties"]["LoadBalancerAttributes"]

    assert table["WarmThroughput"] == {
        "ReadUnitsPerSecond": {"Ref": "WarmReads"},
        "WriteUnitsPerSecond": {"Ref": "WarmWrites"},
    }
    assert table["DeletionProtectionEnabled"] == {"Ref": "DeletionProtection"}
    assert {"Key": "deletion_protection.enabled", "Value": {"Ref": "DeletionProtection"}} in (
        attributes
    )
    assert template["Parameters"]["DeletionProtection"]["Default"] == "true"
    # The least that DynamoDB takes, which every new table has.
    assert [template["Parameters"][f"Warm{one}"]["Default"] for one in ("Reads", "Writes")] == [
        12_000,
        4_000,
    ]


def test_two_regions_have_two_buckets_whose_names_are_short_enough(
    template: dict[str, Any], resources: dict[str, Any]
) -> None:
    name = resources["Bucket"]["Properties"]["BucketName"]["Fn::Sub"]
    longest = name.replace(ENVIRONMENT, "e" * 20).replace("${AWS::AccountId}", "1" * 12)

    assert "${AWS::Region}" in name
    assert len(longest.replace("${AWS::Region}", "ap-southeast-1")) <= 63
    assert "conveyor-ENVIRONMENT-ACCOUNT-REGION" in RUNBOOK.read_text()


def test_an_administrator_has_a_task_inside_the_network(resources: dict[str, Any]) -> None:
    """With the settings that it needs, and every right but that of destroying."""
    [container] = resources["AdminTask"]["Properties"]["ContainerDefinitions"]
    [api] = resources["ApiTask"]["Properties"]["ContainerDefinitions"]
    given = {one["Name"]: one for one in _given(container["Environment"] + container["Secrets"])}
    of_api = {one["Name"]: one for one in _given(api["Environment"] + api["Secrets"])}
    fleet = {one.variable for one in SETTINGS if "conveyor admin" in one.used_by}
    granted = {action for one in _policies(resources["AdminRole"]) for action in _allowed(one)} | {
        action for one in _policies(resources["RecordsAndBlobs"]) for action in _allowed(one)
    }

    assert container["Command"] == ["admin", "check"]
    assert given.items() == {name: of_api[name] for name in of_api.keys() & fleet}.items()
    assert container["EnvironmentFiles"] == api["EnvironmentFiles"]
    assert granted >= {"dynamodb:DescribeTable", "sqs:SetQueueAttributes", "sqs:ReceiveMessage"}
    assert not [action for action in granted if re.search(r":Delete(Table|Bucket)$", action)]
    runbook = RUNBOOK.read_text()
    assert "--task-definition conveyor-production-admin" in runbook
    assert '"name":"admin"' in runbook


def test_apis_are_added_by_their_load(template: dict[str, Any], resources: dict[str, Any]) -> None:
    target = resources["ApiScaling"]["Properties"]
    policy = resources["ApiScalingPolicy"]["Properties"]
    tracking = policy["TargetTrackingScalingPolicyConfiguration"]

    assert target["ResourceId"] == {"Fn::Sub": "service/${Cluster}/${ApiService.Name}"}
    assert (target["MinCapacity"], target["MaxCapacity"]) == (
        {"Ref": "MinApis"},
        {"Ref": "MaxApis"},
    )
    assert tracking["PredefinedMetricSpecification"] == {
        "PredefinedMetricType": "ECSServiceAverageCPUUtilization"
    }
    # A number of its own would take back at each deploy what the load has asked for.
    assert "DesiredCount" not in resources["ApiService"]["Properties"]
    assert template["Parameters"]["MinApis"]["Default"] == 2


def _found(value: Any, *, into_conditions: bool = False) -> Iterator[Any]:
    """Every part of a resource; what hangs on whether there is a restored table only if asked."""
    yield value
    if isinstance(value, dict):
        on = value.get("Fn::If", [None])[0]
        if on == "HasRestoredTable" and not into_conditions:
            return
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from _found(part, into_conditions=into_conditions)
