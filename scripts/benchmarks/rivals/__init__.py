"""Rivals, each in a process of its own, and the three steps of the durable handler, the same in all implementations."""

from __future__ import annotations

STEPS = (1, 2, 3)


def step(data: bytes, number: int) -> bytes:
    """Run a step. After all of STEPS, each once, the data are unchanged, which proves that all were run."""
    return data[:-1] + bytes((data[-1] ^ number,))
