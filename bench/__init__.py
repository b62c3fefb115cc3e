"""Benchmarks of `immortal bench`: real apps, real coordinators, durable logs, so users get the measured results."""
