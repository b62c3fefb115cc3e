"""Debits at three servers that die before their replies are sent; then every coin is counted.

python examples/pirate/debits.py [--debits N] [--seed S]

Each server is a process that ends by kill -9 after some replies, drawn by seed, when the debit is durable and its reply
is not sent. It is restarted at the same endpoint. The three share one store. Status 1: the balance is wrong.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import vault

from immortal.patterns.pirate import Policy, connect

SERVERS = 3
LIVES_REPLIES_MAX = 30  # a server dies at one of its first replies, up to this one
POLICY = Policy(tries=20, heartbeat_s=0.1)  # the debit is done once, however often it is tried


class Keeper:
    """Keeper of one server: it starts a new process whenever the last one has died."""

    def __init__(self, store: Path, seed: int) -> None:
        self.deaths = 0
        self.endpoint = "tcp://127.0.0.1:*"
        self._store = store
        self._chance = random.Random(seed)
        self._lock = threading.Lock()
        self._ended = False
        self._listens = threading.Event()
        self._thread = threading.Thread(target=self._keep)
        self._thread.start()
        self._listens.wait()

    def _keep(self) -> None:
        while (process := self._start()) is not None:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("dies"):
                    self.deaths += 1
                else:
                    self.endpoint = line.strip()
                    self._listens.set()
            if process.wait() != -signal.SIGKILL:
                break  # the process has printed its error
        self._listens.set()

    def _start(self) -> subprocess.Popen[str] | None:
        dies_at = str(self._chance.randint(1, LIVES_REPLIES_MAX))
        command = [sys.executable, vault.__file__, str(self._store), self.endpoint, "--dies-at", dies_at]
        with self._lock:
            if self._ended:
                return None
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            return self._process

    def end(self) -> None:
        with self._lock:
            self._ended = True
            self._process.kill()
        self._thread.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--debits", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.debits < 1:
        parser.error(f"--debits {options.debits}; at least 1 was expected")
    with tempfile.TemporaryDirectory() as folder:
        keepers: list[Keeper] = []
        try:
            for index in range(SERVERS):
                keepers.append(Keeper(Path(folder) / "store", options.seed + index))
                if keepers[-1].endpoint.endswith("*"):
                    return 1
            with connect([keeper.endpoint for keeper in keepers], timeout=60, policy=POLICY) as pool:
                for _ in range(options.debits):
                    left = int(pool.request(b"ada 1"))
        finally:
            for keeper in keepers:
                keeper.end()
    deaths = sum(keeper.deaths for keeper in keepers)
    right = left == vault.BALANCE - options.debits
    print(f"{options.debits} debits of 1 coin, {deaths} servers killed with a reply on its way")
    print(f"{vault.BALANCE} - {options.debits} = {left}: {'right' if right else 'WRONG'}")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
