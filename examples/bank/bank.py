"""Three banks, and a teller that moves money between them. The code handles no failures.

A transfer takes money from one bank and gives it to another. If the second refuses, because the account is closed, the
money is returned. That is all the compensation needed, since a call is never lost and never done twice.

    cd examples/bank
    immortal register north --peer 'tcp://127.0.0.1:*'      immortal run north bank:Bank --restart
    immortal register south --peer 'tcp://127.0.0.1:*'      immortal run south bank:Bank --restart
    immortal register west --peer 'tcp://127.0.0.1:*'       immortal run west bank:Bank --restart
    immortal register teller --peer 'tcp://127.0.0.1:*'     immortal run teller bank:Teller --restart

BANK_TRANSFERS: number of transfers (100). BANK_SEED: seed that draws the transfers (1).
"""

from __future__ import annotations

import os
import random
import time
from typing import NamedTuple

import immortal
from immortal import Immortal, Impulses, impulse, on_primary, peer, rpc

BANKS = ("north", "south", "west")
ACCOUNTS = 100  # of each bank, numbered from 0
CLOSED = 10  # of them, the last ones
OPENING_BALANCE = 1000
LARGEST_AMOUNT = 400  # so that some accounts run dry
AT_ONCE = 512  # transfers that have begun and are not settled
WAIT_S = 0.005  # between two checks of how many are settled

TRANSFERS = int(os.environ.get("BANK_TRANSFERS", "100"))
SEED = int(os.environ.get("BANK_SEED", "1"))


class InsufficientFundsError(Exception):
    pass


class AccountClosedError(Exception):
    pass


class Bank(Immortal):
    balances: dict[int, int]
    closed: set[int]
    entries: dict[int, list[int]]  # by transfer: the amounts added to, or taken from, accounts of this bank

    def __init__(self) -> None:
        self.balances = dict.fromkeys(range(ACCOUNTS), OPENING_BALANCE)
        self.closed = set(range(ACCOUNTS - CLOSED, ACCOUNTS))
        self.entries = {}

    @rpc(raises=[InsufficientFundsError, AccountClosedError])
    def debit(self, transfer: int, account: int, amount: int) -> int:
        if account in self.closed:
            raise AccountClosedError(account)
        if self.balances[account] < amount:
            raise InsufficientFundsError(account, self.balances[account])
        return self._book(transfer, account, -amount)

    @rpc(raises=[AccountClosedError])
    def credit(self, transfer: int, account: int, amount: int) -> int:
        if account in self.closed:
            raise AccountClosedError(account)
        return self._book(transfer, account, amount)

    def _book(self, transfer: int, account: int, amount: int) -> int:
        self.entries.setdefault(transfer, []).append(amount)
        self.balances[account] += amount
        return self.balances[account]


class Order(NamedTuple):
    payer_bank: str
    payer: int
    payee_bank: str
    payee: int
    amount: int


def order(number: int) -> Order:
    """Return the transfer with this number, always the same one."""
    source = random.Random(SEED * 1_000_003 + number)
    payer_bank, payee_bank = source.sample(BANKS, 2)
    payer, payee = source.randrange(ACCOUNTS), source.randrange(ACCOUNTS)
    return Order(payer_bank, payer, payee_bank, payee, source.randint(1, LARGEST_AMOUNT))


class Teller(Immortal):
    north = peer(Bank, "north")
    south = peer(Bank, "south")
    west = peer(Bank, "west")
    ordered: int
    outcomes: dict[int, list[str]]  # by transfer: one of "done", "refused", "returned"

    def __init__(self) -> None:
        self.ordered = 0
        self.outcomes = {}

    @impulse
    def take_order(self, order: Order) -> None:
        self.ordered += 1
        self.transfer.fork(self.ordered, order)

    @rpc
    async def transfer(self, number: int, order: Order) -> None:
        banks = {"north": self.north, "south": self.south, "west": self.west}
        payer_bank, payee_bank = banks[order.payer_bank], banks[order.payee_bank]
        try:
            await payer_bank.debit(number, order.payer, order.amount)
        except (InsufficientFundsError, AccountClosedError):
            await immortal.step(self.settle, number, "refused")
            return
        try:
            await payee_bank.credit(number, order.payee, order.amount)
        except AccountClosedError:
            await payer_bank.credit(number, order.payer, order.amount)  # back to the payer
            await immortal.step(self.settle, number, "returned")
        else:
            await immortal.step(self.settle, number, "done")

    @rpc
    def settle(self, number: int, outcome: str) -> None:
        self.outcomes.setdefault(number, []).append(outcome)

    @on_primary
    def take_orders(self, impulses: Impulses) -> None:
        """Take orders, not too many at a time, so that few wait when a crash occurs."""
        taken = self.ordered
        told = -1
        while told < TRANSFERS:
            settled = len(self.outcomes)
            for number in range(taken + 1, min(TRANSFERS, settled + AT_ONCE) + 1):
                impulses.take_order(order(number))
                taken = number
            if settled > told:
                print(f"settled: {settled}", flush=True)
                told = settled
            time.sleep(WAIT_S)
