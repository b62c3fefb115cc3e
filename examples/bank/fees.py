"""A bank that keeps 1 of each credit: what would be different if it had done so from the start?

immortal what-if north --app fees:Bank
"""

from __future__ import annotations

import bank

from immortal import rpc

FEE = 1


class Bank(bank.Bank):
    @rpc(raises=[bank.AccountClosedError])
    def credit(self, transfer: int, account: int, amount: int) -> int:
        return super().credit(transfer, account, amount - FEE)
