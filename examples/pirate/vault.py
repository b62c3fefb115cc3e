"""A plain server that debits an account, and can be told to die at the worst moment.

python vault.py STORE ENDPOINT [--dies-at N]

With --dies-at it ends by kill -9 just before its Nth reply: the debit is durable, its client hears nothing.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Iterable

from immortal.patterns.pirate import Answer, Request, Server

BALANCE = 1_000_000  # of each account, at first


def debit(request: Request) -> bytes:
    """Take coins from an account; return what is left. The body is ``b"ACCOUNT COINS"``."""
    account, coins = request.body.split()
    left = int(request.rows.get(account, b"%d" % BALANCE)) - int(coins)
    if left < 0:
        raise ValueError(f"{account.decode()} lacks {-left} coins")
    request.rows[account] = b"%d" % left  # durable together with the reply, or neither
    return b"%d" % left


class Vault(Server):
    """Server that counts its replies; it dies before it sends the reply ``dies_at``."""

    dies_at = 0

    def send(self, answers: Iterable[Answer]) -> None:
        kept = list(answers)
        if 0 < self.dies_at <= len(kept):
            print("dies", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        self.dies_at -= len(kept)
        super().send(kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("endpoint")
    parser.add_argument("--dies-at", type=int, default=0, metavar="N")
    options = parser.parse_args()
    server = Vault(debit, options.endpoint, store=options.store)
    server.dies_at = options.dies_at
    print(server.endpoint, flush=True)
    server.run()


if __name__ == "__main__":
    main()
