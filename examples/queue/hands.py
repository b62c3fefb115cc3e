"""A worker of the example: it squares numbers, and misbehaves at random when it gets a task.

    python examples/queue/hands.py QUEUE [--crash 0.05] [--stall 0.05] [--seed S] [--heartbeat SECONDS]

A crash is kill -9 by itself during a task; storm.py restarts the worker. A stall is a second in which the worker does
nothing; then it continues as if nothing had happened.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import signal
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from immortal.patterns.queue import work

STALL_S = 1.0
P = ParamSpec("P")
R = TypeVar("R")


def square(number: int) -> int:
    return number * number


def poison() -> None:
    """Kill the worker that runs this task."""
    os.kill(os.getpid(), signal.SIGKILL)


def misbehaving(function: Callable[P, R], crash: float, stall: float, chance: random.Random) -> Callable[P, R]:
    @functools.wraps(function)
    def wrapped(*arguments: P.args, **keywords: P.kwargs) -> R:
        drawn = chance.random()
        if drawn < crash:
            print("crashes", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        elif drawn < crash + stall:
            print("stalls", flush=True)
            time.sleep(STALL_S)
        result = function(*arguments, **keywords)
        print("did", flush=True)
        return result

    return wrapped


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("queue")
    parser.add_argument("--crash", type=float, default=0.05)
    parser.add_argument("--stall", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--heartbeat", type=float, default=1.0)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    careless = misbehaving(square, options.crash, options.stall, chance)
    work(options.queue, {"square": careless, "poison": poison}, heartbeat=options.heartbeat)


if __name__ == "__main__":
    main()
