"""A worker that the queue is measured with: ``python -m scripts.benchmarks.queue_worker HOME``."""

from __future__ import annotations

import sys

from immortal.patterns.queue import work


def echo(body: bytes) -> bytes:
    return body


if __name__ == "__main__":
    work("jobs", {"echo": echo}, home=sys.argv[1])
