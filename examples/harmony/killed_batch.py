"""A batch whose workers, cluster and collector are killed all the time; then every result is compared.

python examples/harmony/killed_batch.py [--tasks N] [--kills K] [--workers W] [--instances I] [--seed S]

K times a worker is killed with kill -9 and replaced, I times a coordinator or app of the cluster or the collector.
Status 1: a result is missing, doubled or wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import collatz

from immortal.patterns.harmony import Ventilator, connect

sys.path.append(str(Path(__file__).resolve().parents[1]))
from supervised import APP, COORDINATOR, POLL_S, Instance, Keeper, register

HERE = Path(__file__).parent
PATIENCE_S = 300.0  # of each call: a busy machine takes long to start or recover an instance
ROLES = (APP, COORDINATOR)
CLASSES = {"cluster": "immortal.patterns.harmony:Cluster", "steps": "immortal.patterns.harmony:Collector"}


def kill_all_along(cluster: Ventilator, size: int, plan: Sequence[Callable[[], object]]) -> None:
    """Do one of the kills of ``plan`` each time that another equal part of the batch is done."""
    for index, kill in enumerate(plan):
        while cluster.progress("collatz").done < size * (index + 1) // (len(plan) + 1):
            time.sleep(POLL_S)
        kill()


@contextlib.contextmanager
def running(folder: Path, workers: int) -> Iterator[tuple[list[Keeper], list[Instance]]]:
    """Run the workers, each with a keeper that starts another one in its place, and the two instances."""
    command = [sys.executable, "-m", "immortal.patterns.harmony", "work", "cluster", "collatz:steps"]
    environment = {**os.environ, "IMMORTAL_HOME": str(folder), "PYTHONPATH": str(HERE)}
    with contextlib.ExitStack() as stack:
        services = []
        for name in CLASSES:
            register(folder, name)
            services.append(Instance(name, CLASSES[name], folder, HERE, os.environ))
            stack.callback(services[-1].end)
        keepers = [Keeper(lambda: command, print, environment=environment) for _ in range(workers)]
        for keeper in keepers:
            stack.callback(keeper.end)
        yield keepers, services


def kill_a_part(service: Instance, chance: random.Random) -> None:
    service.kill(chance.choice(ROLES))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=100_000)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--instances", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "registry"
        with (
            running(folder, options.workers) as (keepers, services),
            connect("cluster", home=folder, timeout=PATIENCE_S) as cluster,
        ):
            plan: list[Callable[[], object]] = [lambda: chance.choice(keepers).kill()] * options.kills
            for index in range(options.instances):
                plan.append(partial(kill_a_part, services[index % 2], chance))
            chance.shuffle(plan)
            began_s = time.monotonic()
            batch = cluster.batch("collatz", "steps", collector="steps")
            with connect("cluster", home=folder, timeout=PATIENCE_S) as other:
                killing = threading.Thread(target=kill_all_along, args=(other, options.tasks, plan), daemon=True)
                killing.start()
                batch.send(range(options.tasks), report=print)
                progress = batch.wait(report=print)
                took_s = time.monotonic() - began_s
                killing.join()
            count = wrong = 0
            for result in batch.results():
                wrong += result.number != count or result.value != collatz.steps(count)
                count += 1
    right = count == options.tasks and not wrong and not progress.failed
    print(f"{options.kills} workers and {options.instances} parts of instances killed, {progress.resent} tasks resent")
    verdict = "right" if right else "WRONG"
    print(f"{count / took_s:.0f} tasks/s; {count} of {options.tasks} results, {wrong} wrong: {verdict}")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
