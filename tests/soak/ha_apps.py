"""The bank of examples/bank for soaks with takeovers: with a counter for clients, and orders that come all the time."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from immortal import Impulses, on_primary, rpc

if TYPE_CHECKING:
    bank: Any
else:
    import bank  # PYTHONPATH has its folder

ORDERS_VARIABLE = "SOAK_ORDERS"  # a file: how many transfers there are to be by now
LOOK_S = 0.05
AT_ONCE = 64


class CountingBank(bank.Bank):
    counted: int

    def __init__(self) -> None:
        super().__init__()
        self.counted = 0

    @rpc
    def count(self) -> int:
        """One more, and how many there are then."""
        self.counted += 1
        return self.counted

    @rpc
    def count_so_far(self) -> int:
        return self.counted


class SteadyTeller(bank.Teller):
    @rpc
    def settled(self) -> int:
        return len(self.outcomes)

    @on_primary
    def take_orders(self, impulses: Impulses) -> None:
        orders = Path(os.environ[ORDERS_VARIABLE])
        taken = self.ordered
        while True:
            wanted = min(int(orders.read_text()), len(self.outcomes) + AT_ONCE)
            for number in range(taken + 1, wanted + 1):
                impulses.take_order(bank.order(number))
                taken = number
            time.sleep(LOOK_S)
