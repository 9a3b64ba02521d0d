"""Benchmarks of Conveyor, and of its peers on the same job. See bench/README.md."""
