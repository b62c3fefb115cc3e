"""Celery on Redis under the kills of examples/harmony/killed_batch.py: ``python celery_tasks.py --tasks N --kills K``.

Run it by hand, with a Python that has ``celery[redis]``, and ``redis-server`` in PATH; it needs nothing else from here.
Redis writes each command to its disk (appendfsync everysec). Workers acknowledge late and give back the tasks of a lost
one, as Celery's documentation says for tasks that must not be lost; a killed one is restarted. Each task counts its
execution in Redis itself, so that each execution is seen.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import redis
from celery import Celery

URL = os.environ.get("CELERY_BENCH_URL", "redis://127.0.0.1:1/0")
QUIET_S = 20.0  # without a result: the rest is lost, or waits for the visibility timeout
VISIBILITY_S = 5

app = Celery("celery_tasks", broker=URL)
app.conf.update(
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    task_ignore_result=True,
    broker_transport_options={"visibility_timeout": VISIBILITY_S},
    worker_hijack_root_logger=False,
)
store = redis.Redis.from_url(URL)


@app.task(name="steps")  # type: ignore[untyped-decorator]
def steps(number: int) -> None:
    value, count = number + 1, 0
    while value != 1:
        value = value // 2 if value % 2 == 0 else 3 * value + 1
        count += 1
    store.hincrby("executions", str(number), 1)


def _worker(log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "celery", "-A", "celery_tasks", "worker", "--pool", "solo", "-l", "ERROR"]
    name = f"w{time.monotonic_ns()}@here"
    with log.open("ab") as output:
        return subprocess.Popen(
            [*command, "-n", name, "--without-gossip", "--without-mingle"],
            cwd=Path(__file__).parent,
            stdout=output,
            stderr=output,
        )


def _send(tasks: int) -> None:
    with app.producer_pool.acquire(block=True) as producer:
        for number in range(tasks):
            steps.apply_async((number,), producer=producer)


def _run(tasks: int, kills: int, workers: int, chance: random.Random, log: Path) -> None:
    while True:
        try:
            store.ping()
            break
        except redis.ConnectionError:
            time.sleep(0.05)
    processes = [_worker(log) for _ in range(workers)]
    try:
        began_s = time.monotonic()
        sending = threading.Thread(target=_send, args=(tasks,), daemon=True)
        sending.start()
        done = killed = 0
        changed_s = time.monotonic()
        while done < tasks and time.monotonic() - changed_s < QUIET_S:
            now_done = store.hlen("executions")
            if now_done != done:
                done, changed_s = now_done, time.monotonic()
            if killed < kills and done >= tasks * (killed + 1) // (kills + 1):
                index = chance.randrange(workers)
                processes[index].send_signal(signal.SIGKILL)
                processes[index].wait()
                processes[index] = _worker(log)
                killed += 1
            time.sleep(0.02)
        took_s = changed_s - began_s
        counts = [int(count) for count in store.hvals("executions")]
        doubled = sum(count > 1 for count in counts)
        print(f"{done} of {tasks} done within {took_s:.1f} s: {done / took_s:.0f} tasks/s")
        print(f"{killed} workers killed; {tasks - done} tasks lost, {doubled} executed more than once")
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=20_000)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--workers", type=int, default=4)
    options = parser.parse_args()
    if "CELERY_BENCH_URL" not in os.environ:
        with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
            free.close()
            program = shutil.which("redis-server")
            if program is None:
                sys.exit("there is no redis-server in PATH")
            place = ["--port", str(port), "--bind", "127.0.0.1", "--dir", folder]
            arguments = [*place, "--appendonly", "yes", "--save", ""]
            server = subprocess.Popen([program, *arguments], stdout=subprocess.DEVNULL)
            try:
                environment = {**os.environ, "CELERY_BENCH_URL": f"redis://127.0.0.1:{port}/0"}
                subprocess.run([sys.executable, __file__, *sys.argv[1:]], env=environment, check=True)
            finally:
                server.terminate()
                server.wait()
        return
    with tempfile.TemporaryDirectory() as folder:
        _run(options.tasks, options.kills, options.workers, random.Random(1), Path(folder) / "log")


if __name__ == "__main__":
    main()
