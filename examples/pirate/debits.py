"""Debits at three servers that die before their replies are sent; then every coin is counted.

python examples/pirate/debits.py [--debits N] [--seed S]

Each server is a process that ends by kill -9 after some replies, drawn by seed, when the debit is durable and its reply
is not sent. It is restarted at the same endpoint. The three share one store. Status 1: the balance is wrong.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import vault

from immortal.patterns.pirate import Policy, connect

sys.path.append(str(Path(__file__).resolve().parents[1]))
from supervised import POLL_S, STOP_S, Keeper

SERVERS = 3
LIVES_REPLIES_MAX = 30  # a server dies at one of its first replies, up to this one
POLICY = Policy(tries=20, heartbeat_s=0.1)  # the debit is done once, however often it is tried


class Vaults:
    """Servers, each with a keeper that starts it again at its endpoint whenever it has died."""

    def __init__(self, store: Path, seed: int) -> None:
        self.endpoints = ["tcp://127.0.0.1:*"] * SERVERS
        self._store = store
        self._listen = [threading.Event() for _ in range(SERVERS)]
        self._chances = [random.Random(seed + index) for index in range(SERVERS)]
        self.keepers = [
            Keeper(partial(self._command, index), partial(self._on_line, index), dies_with=-signal.SIGKILL)
            for index in range(SERVERS)
        ]

    def _command(self, index: int) -> list[str]:
        dies_at = str(self._chances[index].randint(1, LIVES_REPLIES_MAX))
        return [sys.executable, vault.__file__, str(self._store), self.endpoints[index], "--dies-at", dies_at]

    def _on_line(self, index: int, line: str) -> None:
        if line != "dies":
            self.endpoints[index] = line
            self._listen[index].set()

    def all_listen(self) -> bool:
        """Wait until all servers listen; return False once one of them has ended, or after too long."""
        until_s = time.monotonic() + STOP_S
        while not all(one.is_set() for one in self._listen):
            if time.monotonic() > until_s or not all(keeper.is_running for keeper in self.keepers):
                return False
            time.sleep(POLL_S)
        return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--debits", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.debits < 1:
        parser.error(f"--debits {options.debits}; at least 1 was expected")
    with tempfile.TemporaryDirectory() as folder:
        vaults = Vaults(Path(folder) / "store", options.seed)
        try:
            if not vaults.all_listen():
                return 1  # a process has printed its error
            with connect(vaults.endpoints, timeout=60, policy=POLICY) as pool:
                for _ in range(options.debits):
                    left = int(pool.request(b"ada 1"))
        finally:
            for keeper in vaults.keepers:
                keeper.end()
    deaths = sum(keeper.deaths for keeper in vaults.keepers)
    right = left == vault.BALANCE - options.debits
    print(f"{options.debits} debits of 1 coin, {deaths} servers killed with a reply on its way")
    print(f"{vault.BALANCE} - {options.debits} = {left}: {'right' if right else 'WRONG'}")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
