"""What a turn of the core costs by itself: with sockets, disk and wake-ups taken away."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import msgspec

from immortal.bench.processes import BenchError

IDLE_PEERS = (10, 1_000)
TIMEOUT_S = 120


@dataclass(frozen=True, slots=True)
class TurnCosts:
    """Processor time in µs, the least of several runs.

    ``awaited_us``: an awaited call between two instances in one process, apps included. The others: the core alone,
    for a call to one peer and its acknowledgement, with so many peers as IDLE_PEERS says.
    """

    awaited_us: float
    few_peers_us: float
    many_peers_us: float


def measure_turns() -> TurnCosts:
    """In a process of its own. Raises BenchError."""
    command = [sys.executable, "-P", "-m", "immortal.bench.turn_apps"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise BenchError(f"the turns could not be measured: {done.stderr.strip()[-2000:]}")
    return msgspec.json.decode(done.stdout, type=TurnCosts)
