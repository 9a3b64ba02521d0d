"""The API keys that may call: any, given hashes, or the hashes in a file that may change."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

import anyio
import httpx
import pytest

from conveyor.dev.binding import open_binding
from conveyor.domain.api_keys import is_key_hash, key_hash
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.http.app import AppOptions, create_app
from conveyor.http.auth import AnyKey, ApiKeys, Operator, open_api_keys, open_operator_keys
from conveyor.service import Service, ServiceOptions
from conveyor.service.progress import BEAT
from conveyor.testing.clock import FakeClock
from tests.unit.http_api import open_api
from tests.webhooks import loopback_webhooks

ORIGIN = "http://127.0.0.1:9000"
ALICE, BOB = "key-of-alice", "key-of-bob"


@pytest.fixture
def anyio_backend() -> str:
    """The store runs on asyncio."""
    return "asyncio"


def refusal(text: str) -> str:
    with pytest.raises(ConveyorError) as caught:
        open_api_keys(text)
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    return caught.value.detail


def test_a_hash_is_the_sha256_of_the_key() -> None:
    assert key_hash(ALICE) == f"sha256:{hashlib.sha256(ALICE.encode()).hexdigest()}"
    assert is_key_hash(key_hash(ALICE))
    assert is_key_hash(f"sha256:{'A' * 64}")
    assert not is_key_hash(ALICE)
    assert not is_key_hash(key_hash(ALICE) + "0")


def test_any_takes_every_key() -> None:
    assert open_api_keys("any").knows(ALICE)


@pytest.mark.parametrize(
    "text",
    [
        key_hash(ALICE),
        f"{key_hash('other')}, {key_hash(ALICE)}",
        f"# of the team\n{key_hash(ALICE)} Alice\n",
    ],
)
def test_hashes_may_stand_in_the_setting_itself(text: str) -> None:
    keys = open_api_keys(text)

    assert keys.knows(ALICE)
    assert not keys.knows(BOB)


def test_a_file_holds_hashes_and_words_for_people(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# keys\n\n{key_hash(ALICE)}  Alice, since May\n")
    keys = open_api_keys(str(file))

    assert keys.knows(ALICE)
    assert not keys.knows(BOB)


def test_upper_case_digits_are_the_same_hash(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("sha256:" + key_hash(ALICE).removeprefix("sha256:").upper())

    assert open_api_keys(str(file)).knows(ALICE)


def replace(file: Path, text: str) -> None:
    """Replace a file as a deployment does: a new file takes the place of the old one."""
    aside = file.with_suffix(".new")
    aside.write_text(text)
    os.replace(aside, file)


def test_a_change_of_the_file_counts_at_once(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(key_hash(ALICE))
    keys = open_api_keys(str(file))
    replace(file, key_hash(BOB))

    assert keys.knows(BOB)
    assert not keys.knows(ALICE)


@pytest.mark.parametrize("text", ["", "no hash", None])
def test_a_file_that_breaks_leaves_the_keys_as_they_were(
    tmp_path: Path, text: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    file.write_text(key_hash(ALICE))
    keys = open_api_keys(str(file))
    if text is None:
        file.unlink()
    else:
        replace(file, text)
    with caplog.at_level(logging.ERROR, "conveyor.http"):
        known = [keys.knows(ALICE), keys.knows(ALICE), keys.knows(BOB)]

    assert known == [True, True, False]
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    replace(file, key_hash(BOB))
    assert keys.knows(BOB)


def test_what_cannot_be_used_is_refused_at_the_start(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    assert "readable file" in refusal(str(file))
    file.write_text("# nobody\n")
    assert refusal(str(file)).endswith("names a file without a key hash")
    file.write_text(f"{key_hash(ALICE)}\n{BOB}\n")
    detail = refusal(str(file))
    assert "line 2" in detail
    assert BOB not in detail


async def answers(tmp_path: Path, keys: ApiKeys | None) -> dict[str, httpx.Response]:
    """Return the answers that each of three callers gets from an API with these keys."""
    clock = FakeClock()
    binding = await open_binding(tmp_path / "data", clock)
    service = Service(
        binding.ports,
        ServiceOptions(public_origin=ORIGIN),
        clock,
        webhooks=loopback_webhooks(clock),
    )
    app = create_app(
        service,
        registry=None,
        ready=lambda: True,
        clock=clock,
        options=AppOptions(
            allowed_hosts=[],
            api_keys=keys or AnyKey(),
        ),
    )
    found = {}
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url=ORIGIN) as client:
        for key in (ALICE, BOB):
            found[key] = await client.get("/v1/jobs", headers={"X-API-Key": key})
        found["nobody"] = await client.get("/v1/jobs")
        found["metrics"] = await client.get("/metrics")
        found["readyz"] = await client.get("/readyz")
    await binding.ports.aclose()
    return found


async def test_an_unknown_key_is_answered_like_none_at_all(tmp_path: Path) -> None:
    found = await answers(tmp_path, open_api_keys(key_hash(ALICE)))

    assert found[ALICE].status_code == 200
    for caller in (BOB, "nobody"):
        assert found[caller].status_code == 401
        assert found[caller].json()["code"] == "unauthenticated"
    assert BOB not in found[BOB].text


async def test_without_a_list_every_key_may_call(tmp_path: Path) -> None:
    found = await answers(tmp_path, None)

    assert [found[key].status_code for key in (ALICE, BOB, "nobody")] == [200, 200, 401]


async def test_an_api_without_a_registry_shows_no_metrics(tmp_path: Path) -> None:
    found = await answers(tmp_path, None)

    assert found["metrics"].status_code == 404
    assert found["readyz"].status_code == 200


async def test_the_stream_of_a_key_that_is_withdrawn_ends(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{key_hash(ALICE)}\n{key_hash(BOB)}\n")
    async with (
        open_api(tmp_path / "data", api_keys=open_api_keys(str(file))) as api,
        anyio.create_task_group() as group,
    ):
        group.start_soon(api.service.progress.run)
        told: dict[str, str] = {}

        async def listen(name: str, client: httpx.AsyncClient, path: str) -> None:
            told[name] = (await client.get(path)).text

        job = await api.submit(1)
        run = f"/v1/jobs/{job['job_id']}/runs/{job['latest_run']['run_id']}/events"
        group.start_soon(listen, "run", api.client, run)
        group.start_soon(listen, "all", api.client, "/v1/events")
        group.start_soon(listen, "other", api.foreign, "/v1/events")
        while api.service.progress.streams < 3:
            await anyio.lowlevel.checkpoint()
        file.write_text(f"{key_hash(BOB)}\n")
        await anyio.wait_all_tasks_blocked()
        await api.clock.advance(BEAT)
        while len(told) < 2:
            await anyio.lowlevel.checkpoint()
        assert told.keys() == {"run", "all"}
        assert all(text.endswith("event: bye\ndata: {}\n\n") for text in told.values())
        assert api.service.progress.streams == 1
        group.cancel_scope.cancel()


# -- operators --


def test_operators_are_named_as_callers_are_and_may_act(tmp_path: Path) -> None:
    file = tmp_path / "operators"
    lines = f"{key_hash(ALICE)} acts at night\n{key_hash(BOB)} reads acts\n"
    file.write_text(lines)
    for text in (lines, str(file), lines.replace(" at night", "").strip().replace("\n", ",")):
        operators = open_operator_keys(text)

        assert operators.find(ALICE) == Operator(key_hash(ALICE), acts=True)
        assert operators.find(BOB) == Operator(key_hash(BOB), acts=False)
        assert operators.find("key-of-nobody") is None
    file.write_text(key_hash(BOB))
    operators = open_operator_keys(str(file))
    replace(file, f"{key_hash(BOB)} acts")
    assert operators.find(BOB) == Operator(key_hash(BOB), acts=True)


def test_a_file_of_operators_that_breaks_is_named_by_its_setting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "operators"
    file.write_text(key_hash(ALICE))
    operators = open_operator_keys(str(file))
    replace(file, "no hash")
    with caplog.at_level(logging.ERROR, "conveyor.http"):
        assert operators.find(ALICE) is not None

    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("keeping the earlier keys: CONVEYOR_OPERATOR_KEYS ")
    assert "API" not in line


def test_without_the_setting_nobody_is_an_operator() -> None:
    assert open_operator_keys("").find(ALICE) is None


@pytest.mark.parametrize("text", ["any", "no/such/file", f"{key_hash(ALICE)},{BOB}"])
def test_operators_are_never_any(text: str) -> None:
    with pytest.raises(ConveyorError) as caught:
        open_operator_keys(text)

    assert caught.value.detail.startswith("CONVEYOR_OPERATOR_KEYS ")
    assert BOB not in caught.value.detail
