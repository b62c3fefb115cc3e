"""Tasks for workers that crash and stall at random, through a queue that is killed too; every result is checked.

    python examples/queue/storm.py [--tasks N] [--workers N] [--kills N] [--pause SECONDS] [--seed S]

Each worker is a process that is restarted after a pause when it has died. A stall is longer than the tasks' timeout, so
the task goes to the next worker and the late reply is dropped. The queue, with its supervisor, is killed (kill -9)
--kills times. One task kills every worker that gets it, and becomes a dead letter. Status 1: a result is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from itertools import count
from pathlib import Path

import hands

from immortal.client import connect as connect_client
from immortal.patterns.queue import Queue, TaskFailed, connect

sys.path.append(str(Path(__file__).resolve().parents[1]))
from supervised import SUPERVISOR, Instance, Keeper, register

NAME = "jobs"
TIMEOUT_S = 0.5  # of a try: shorter than a stall
TRIES = 50  # of ordinary tasks: enough that misbehaving workers make no dead letters of them
POISON_TRIES = 2
RESULT_S = 120.0


async def _run(home: Path, broker: Instance, tasks: int, kills: int) -> tuple[int, str]:
    """Run tasks and kills; return (number of wrong results, why the poisonous task failed)."""
    async with connect(NAME, home=home, timeout=None) as jobs:
        poison = await jobs.submit("poison", tries=POISON_TRIES, dedup="poison")
        submitted = [
            await jobs.submit("square", [number], returns=int, timeout=TIMEOUT_S, tries=TRIES, dedup=f"task {number}")
            for number in range(tasks)
        ]
        done = 0
        kill_at = {tasks * (kill + 1) // (kills + 1) for kill in range(kills)}

        async def result(number: int) -> bool:
            nonlocal done
            right = await submitted[number].result(RESULT_S) == number * number
            done += 1
            if done in kill_at:
                broker.kill(SUPERVISOR)
            return right

        results = await asyncio.gather(*map(result, range(tasks)))
        try:
            await poison.result(RESULT_S)
        except TaskFailed as error:
            return results.count(False), error.reason
    return results.count(False), ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=300)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--pause", type=float, default=5.0, help="Seconds before a worker is started again.")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.tasks < 1 or options.workers < 1 or options.kills < 0:
        parser.error("at least 1 task, 1 worker and 0 kills were expected")
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        register(home, NAME)
        broker = Instance(NAME, "immortal.patterns.queue:Queue", home, Path(folder), os.environ)
        keepers: list[Keeper] = []
        lines: list[str] = []
        try:
            broker.until_ready()
            seeds = count(options.seed)
            hand = [sys.executable, hands.__file__, NAME, "--heartbeat", "0.2", "--seed"]
            environment = {**os.environ, "IMMORTAL_HOME": str(home)}
            for _ in range(options.workers):
                keepers.append(
                    Keeper(
                        lambda: [*hand, str(next(seeds))], lines.append, environment=environment, pause_s=options.pause
                    )
                )
            wrong, reason = asyncio.run(_run(home, broker, options.tasks, options.kills))
            with connect_client(Queue, NAME, home=home, timeout=RESULT_S) as queue:
                late_replies = queue.overview("dead").late_replies
        finally:
            for keeper in keepers:
                keeper.end()
            broker.end()
    deaths = sum(keeper.deaths for keeper in keepers)
    print(f"{options.tasks} tasks, {options.workers} workers, the queue killed {options.kills} times")
    print(f"{deaths} workers died, {lines.count('stalls')} stalled, {late_replies} late replies were dropped")
    print(f"the function was called to its end {lines.count('did')} times")
    print(f"poison: {reason}")
    print(f"{options.tasks - wrong} results are right, {wrong} wrong")
    return 1 if wrong or not reason else 0


if __name__ == "__main__":
    sys.exit(main())
