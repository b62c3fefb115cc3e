"""Other products to compare with, each in its own process. They all run the same three steps of a durable handler."""

from __future__ import annotations

STEPS = (1, 2, 3)


def step(data: bytes, number: int) -> bytes:
    """Run a step, which changes the last byte. Once each of STEPS has run, the data are as before: so all have run."""
    return data[:-1] + bytes((data[-1] ^ number,))
