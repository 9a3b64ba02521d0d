"""Micro-benchmarks by pytest-benchmark; run by `scripts/bench micro`."""
