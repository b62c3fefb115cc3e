"""Two apps for tests of waits, failures and changes: a bank, and a teller who calls it."""

from __future__ import annotations

from datetime import datetime, timedelta

import immortal
from immortal import Immortal, Impulses, every, impulse, on_primary, peer, rpc, upgrades


class InsufficientFundsError(Exception):
    def __init__(self, account: str, missing: int) -> None:
        super().__init__(account, missing)
        self.missing = missing


class Bank(Immortal):
    accounts: dict[str, int]

    def __init__(self) -> None:
        self.accounts = {"ann": 100, "bob": 0}

    @rpc(raises=[InsufficientFundsError])
    def debit(self, account: str, amount: int = 1) -> int:
        if self.accounts[account] < amount:
            raise InsufficientFundsError(account, amount - self.accounts[account])
        self.accounts[account] -= amount
        return self.accounts[account]

    @rpc
    def credit(self, account: str, amount: int) -> int:
        self.accounts[account] += amount
        return self.accounts[account]


class Teller(Immortal):
    bank = peer(Bank, "bank")
    moved: int
    began: datetime
    ticks: list[datetime]
    draws: list[float]

    def __init__(self) -> None:
        self.moved = 0
        self.began = immortal.now()
        self.ticks = []
        self.draws = []

    @rpc
    def count(self, amount: int) -> int:
        self.moved += amount
        self.draws.append(immortal.random.random())
        return self.moved

    @impulse
    async def transfer(self, payer: str, payee: str, amount: int) -> bool:
        try:
            await self.bank.debit(payer, amount)
        except InsufficientFundsError:
            return False
        await immortal.sleep(timedelta(hours=1))
        await self.bank.credit(payee, amount)
        await immortal.step(self.count, amount)
        return True

    @impulse
    def feeds(self, account: str, amount: int) -> None:
        self.bank.credit.fork(account, amount)

    @impulse
    async def approved(self) -> str:
        return await immortal.event("approved", str)

    @impulse
    def approve(self, how: str) -> None:
        immortal.signal("approved", how)

    @every("1d")
    def tick(self) -> None:
        self.ticks.append(immortal.now())

    @on_primary
    def feed(self, impulses: Impulses) -> None:
        for _ in range(self.moved, 3):
            impulses.to(self).count(1)
        impulses.checkpoint()
        impulses.flush()
        if self.moved != 3:
            raise AssertionError(f"after the flush {self.moved} are handled")
        impulses.to(self.bank).credit("bob", 7)


@upgrades(Bank)
class RichBank(Immortal):
    accounts: dict[str, int]
    fees: int

    def __init__(self) -> None:
        self.accounts = {}
        self.fees = 0

    @classmethod
    def upgrade(cls, old: Bank) -> RichBank:
        new = cls()
        new.accounts = {name: 10 * amount for name, amount in old.accounts.items()}
        return new

    @rpc
    def debit(self, account: str, amount: int = 1) -> int:
        self.fees += 1
        self.accounts[account] -= amount
        return self.accounts[account]

    @rpc
    def credit(self, account: str, amount: int) -> int:
        self.accounts[account] += amount
        return self.accounts[account]
