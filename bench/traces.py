"""Measures what traces cost a task: without the extra, installed and off, and at a ratio of 0.01.

Each round drains the same tasks once a row, by a server of its own, the order turned by one from
round to round. Ratios are taken within a round, to the server that cannot import OpenTelemetry.
The collector is a thread of this benchmark: it reads each batch and answers 200.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from bench.accounting import ARGUMENTS, WARM_UP, Drained, drain
from bench.conveyor_server import ConveyorServer
from bench.fake_targets import small
from bench.harness import Figure, Options, Ratio, Row, Scenario, Spread, judged_row, median
from bench.rounds import take_rounds

WITHOUT, OFF, SAMPLED = "not installed", "installed but off", "a ratio of 0.01"
ROWS = (WITHOUT, OFF, SAMPLED)
Turn = Mapping[str, Drained]


class _Collector(BaseHTTPRequestHandler):
    """Takes every batch of spans, and keeps none."""

    protocol_version = "HTTP/1.1"
    batches = 0

    def do_POST(self) -> None:
        type(self).batches += 1
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing of a request."""


@contextmanager
def _collector() -> Iterator[str]:
    """Run a collector on a free port of loopback; its endpoint."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Collector) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def _environment(name: str, options: Options, endpoint: str) -> dict[str, str]:
    """Return the variables of a row's server."""
    if name == SAMPLED:
        return {"CONVEYOR_OTLP_ENDPOINT": endpoint, "CONVEYOR_TRACE_RATIO": "0.01"}
    if name == OFF:
        return {}
    hidden = options.directory("hidden")
    package = hidden / "opentelemetry"
    package.mkdir()
    (package / "__init__.py").write_text('raise ImportError("hidden from this server")\n')
    return {"PYTHONPATH": str(hidden)}


def once(name: str, options: Options, endpoint: str) -> Drained:
    """Drain the tasks once. Raises RuntimeError if a server that samples sent nothing."""
    urls = [small(number) for number in range(options.tasks + WARM_UP)]
    data_dir = options.directory("traces") / "data"
    environment = _environment(name, options, endpoint)
    before = _Collector.batches
    with ConveyorServer(data_dir, *ARGUMENTS, environment=environment) as server:
        drain(server, urls[:WARM_UP])
        drained = drain(server, urls[WARM_UP:])
    if (_Collector.batches > before) is not (name == SAMPLED):
        raise RuntimeError(f"{name}: {_Collector.batches - before} batches reached the collector")
    return drained


def figures(name: str, tasks: int, turns: Sequence[Turn]) -> dict[str, Figure]:
    """Return the figures of a row."""
    found: dict[str, Figure] = {
        "tasks/s": round(median([tasks / turn[name].seconds for turn in turns])),
        "µs CPU/task": round(median([turn[name].cpu_seconds / tasks * 1e6 for turn in turns]), 1),
    }
    if name != WITHOUT and WITHOUT in turns[0]:
        rates = Spread.of([turn[WITHOUT].seconds / turn[name].seconds for turn in turns])
        costs = [turn[WITHOUT].cpu_seconds / turn[name].cpu_seconds for turn in turns]
        found |= {
            "× its tasks/s": Ratio(rates.median),
            "× least": Ratio(rates.least),
            "× most": Ratio(rates.most),
            "× its tasks a CPU second": Ratio(median(costs)),
        }
    return found


def run(options: Options) -> list[Row]:
    """Drain the same tasks by all servers, in turn."""
    names = [name for name in ROWS if options.wants(name)]
    if not names:
        return []
    order = list(names)

    def turn(endpoint: str) -> Turn:
        order.append(order.pop(0))
        return {name: once(name, options, endpoint) for name in order}

    with _collector() as endpoint:
        rounds = take_rounds(
            lambda: turn(endpoint),
            wanted=options.repeats,
            label="traces",
            describe=lambda taken: "; ".join(
                f"{name} {options.tasks / drained.seconds:,.0f} tasks/s"
                for name, drained in taken.items()
            ),
        )
    return [judged_row(name, rounds, partial(figures, name, options.tasks)) for name in names]


SCENARIO = Scenario(name="traces", run=run)
