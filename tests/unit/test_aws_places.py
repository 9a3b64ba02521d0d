"""CallPlaces of calls to AWS: those that boto3 sends them to, or boto3 sends them itself."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from conveyor.domain.errors import ConveyorError
from conveyor.prod.aws.boto import make_clients
from conveyor.prod.aws.calls import AwsOptions
from conveyor.prod.aws.places import CallPlace, CallPlaces
from tests.nasty.certificate import Certificate
from tests.unit.aws_stub import Stub, calling, give_keys, own, serving

pytestmark = [pytest.mark.extended, pytest.mark.slow]

GET: tuple[str, str, dict[str, Any]] = ("dynamodb", "get_item", {"TableName": "t", "Key": {}})
PUT: tuple[str, str, dict[str, Any]] = (
    "s3",
    "put_object",
    {"Bucket": "bucket", "Key": "k", "Body": b""},
)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No setting of the machine counts."""
    give_keys(monkeypatch)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.delenv("AWS_CA_BUNDLE", raising=False)
    monkeypatch.delenv("REQUESTS_CA_BUNDLE", raising=False)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


def place(service: str, *, bucket: str = "bucket", **options: Any) -> CallPlace | None:
    """Return the place of calls to a service."""
    clients, _ = make_clients(AwsOptions(**options), (service,))
    return CallPlaces(clients).find(service, {"Bucket": bucket})


def where(found: CallPlace | None) -> tuple[str, str, str]:
    assert found is not None
    return found.url, found.host, found.path


@pytest.mark.parametrize(
    ("service", "options", "expected"),
    [
        ("dynamodb", {}, ("https://dynamodb.us-east-1.amazonaws.com/", "", "/")),
        ("sqs", {"region": "eu-west-1"}, ("https://sqs.eu-west-1.amazonaws.com/", "", "/")),
        ("sqs", {"region": "cn-north-1"}, ("https://sqs.cn-north-1.amazonaws.com.cn/", "", "/")),
        ("s3", {}, ("https://bucket.s3.amazonaws.com", "", "")),
        ("s3", {"region": "eu-west-1"}, ("https://bucket.s3.eu-west-1.amazonaws.com", "", "")),
        ("s3", {"bucket": "a.b"}, ("https://s3.amazonaws.com/a.b", "", "/a.b")),
        ("s3", {"s3_endpoint": "http://h:80/x"}, ("http://h:80/x/bucket", "h", "/x/bucket")),
        ("sqs", {"sqs_endpoint": "http://h:1/a//b"}, ("http://h:1/a//b", "h:1", "/a/b")),
        ("dynamodb", {"dynamodb_endpoint": "https://h:443"}, ("https://h:443/", "h", "/")),
    ],
)
def test_calls_go_where_boto3_would_send_them(
    service: str, options: dict[str, Any], expected: tuple[str, str, str]
) -> None:
    url, host, path = expected
    assert where(place(service, **options)) == (url, host or url.split("/")[2], path)


@pytest.mark.parametrize(
    ("variable", "value", "hosts"),
    [
        ("AWS_USE_FIPS_ENDPOINT", "true", ("dynamodb-fips.us-east-1", "bucket.s3-fips.us-east-1")),
        ("AWS_USE_DUALSTACK_ENDPOINT", "true", ("api.aws", "bucket.s3.dualstack.us-east-1")),
        ("AWS_ENDPOINT_URL", "https://elsewhere", ("elsewhere", "elsewhere")),
    ],
)
def test_so_they_do_by_settings_of_the_sdk(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, hosts: tuple[str, str]
) -> None:
    monkeypatch.setenv(variable, value)
    for service, host in zip(("dynamodb", "s3"), hosts, strict=True):
        assert host in where(place(service))[1]


def test_what_cannot_be_signed_or_reached_here_is_left_to_boto3(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="conveyor.aws")
    for proxy in ("https://proxy:8080", "http://pro_xy:8080/path"):
        monkeypatch.setenv("HTTPS_PROXY", proxy)
        assert place("dynamodb") is None
    monkeypatch.delenv("HTTPS_PROXY")
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:8080")
    assert place("dynamodb", dynamodb_endpoint="http://tables:8000") is None
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3
    assert all("go through boto3" in record.message for record in caplog.records)


def test_proxies_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://user:pass@proxy:3128")
    monkeypatch.setenv("NO_PROXY", "tables.example.com")
    passed = place("dynamodb")
    assert passed is not None
    assert passed.proxy is not None
    assert passed.proxy.origin.host == "proxy"
    assert passed.proxy.authorization
    direct = place("dynamodb", dynamodb_endpoint="https://tables.example.com")
    assert direct is not None
    assert direct.proxy is None


# -- TLS --


@pytest.fixture
async def there(tmp_path: Path) -> AsyncIterator[tuple[Stub, Certificate]]:
    """A server that speaks TLS, and its certificate."""
    certificate = Certificate(tmp_path)
    async with serving(Stub(), tls=certificate.server_context()) as stub:
        yield stub, certificate


@pytest.mark.parametrize("variable", ["AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE"])
async def test_the_authority_that_is_named_is_trusted(
    monkeypatch: pytest.MonkeyPatch, there: tuple[Stub, Certificate], variable: str
) -> None:
    stub, certificate = there
    monkeypatch.setenv(variable, str(certificate.authority))
    async with calling(stub.url, services=["dynamodb"], fresh=True) as aws:
        await aws.call(*GET)
        assert own(aws).open_connections == 1
    assert stub.seen[0].fields["user-agent"] == "conveyor"


@pytest.mark.parametrize("carrier", ["http", "boto"])
async def test_nobody_else_is_trusted(there: tuple[Stub, Certificate], carrier: str) -> None:
    stub, _ = there
    async with calling(stub.url, services=["dynamodb"], fresh=True, carrier=carrier) as aws:
        with pytest.raises(ConveyorError, match="does not answer get_item: SSLError"):
            await aws.call(*GET)
    assert not stub.seen


@pytest.mark.parametrize("carrier", ["http", "boto"])
async def test_a_certificate_of_another_host_is_refused(
    monkeypatch: pytest.MonkeyPatch, there: tuple[Stub, Certificate], carrier: str
) -> None:
    stub, certificate = there
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate.authority))
    url = stub.url.replace("127.0.0.1", "127.0.0.9")
    async with calling(url, services=["dynamodb"], fresh=True, carrier=carrier) as aws:
        with pytest.raises(ConveyorError, match="SSLError|EndpointConnectionError"):
            await aws.call(*GET)
    assert not stub.seen


async def test_without_keys_nothing_is_sent() -> None:
    async with serving(Stub()) as stub, calling(stub.url, services=["s3"], keys=None) as aws:
        with pytest.raises(ConveyorError, match="no AWS credentials found"):
            await aws.call(*PUT)
    assert not stub.seen
