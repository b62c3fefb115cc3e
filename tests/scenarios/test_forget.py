"""A person is forgotten: nothing of what two services, their logs, copies and tools have tells the address any more."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

pytest.importorskip("cryptography")

from immortal import Personal
from immortal.client import connect, start
from immortal.coordinator.operator import control
from immortal.protocol import personal_keys
from immortal.protocol.files import acquire_lock, open_lock
from tests.helpers.cli import HOME, Run, immortal

MARKER, OTHER = "xyzzy-plugh", "frotz-gnusto"
APP = """
import immortal
from immortal import Immortal, Personal, peer, query, rpc


class Mailer(Immortal):
    sent: int
    letters: list[int]

    def __init__(self) -> None:
        self.sent = 0
        self.letters = []

    @rpc
    def send(self, address: Personal[str], text: Personal[str]) -> None:
        self.sent += 1
        self.letters.append(len(address.value or ""))


class Shop(Immortal):
    mailer = peer(Mailer, "mailer")
    addresses: dict[str, Personal[str]]
    notes: dict[str, Personal[str]]
    orders: int
    lengths: list[int]

    def __init__(self) -> None:
        self.addresses = {}
        self.lengths = []
        self.notes = {}
        self.orders = 0

    @rpc
    def register(self, customer: str, address: Personal[str]) -> None:
        self.addresses[customer] = address

    @rpc
    def order(self, customer: str) -> None:
        self.orders += 1
        address = self.addresses[customer]
        self.mailer.send.fork(address, Personal(customer, f"Dear {address.value}"))

    @rpc
    async def wait(self, customer: str) -> str:
        note = await immortal.event("note", Personal[str])
        await immortal.step(self.keep, customer, note)
        return "done"

    def keep(self, customer: str, note: Personal[str]) -> None:
        self.notes[customer] = note

    @rpc
    async def remember(self, customer: str) -> None:
        address = self.addresses[customer].value
        await immortal.event("go", str)
        await immortal.step(self.keep_length, len(address or ""))

    def keep_length(self, length: int) -> None:
        self.lengths.append(length)

    @rpc
    def go(self, note: Personal[str]) -> None:
        immortal.signal("note", note)
        immortal.signal("go", "")

    @rpc
    async def read_and_wait(self, customer: str) -> None:
        if self.addresses[customer].value is not None:
            await immortal.event("never", str)

    @query
    def state(self) -> tuple[list[int], dict[str, Personal[str]], dict[str, Personal[str]]]:
        return [self.orders, *self.lengths], self.addresses, self.notes

    @query
    def address(self, customer: str) -> Personal[str]:
        return self.addresses[customer]
"""


@pytest.fixture(autouse=True)
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(personal_keys.NOTES_VARIABLE, raising=False)
    monkeypatch.setenv(personal_keys.KEYS_VARIABLE, str(tmp_path / "keys"))


def telling(word: str, *folders: Path) -> list[Path]:
    """Return the files that hold the word, in any encoding of text that a format could choose."""
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 20
    words = [word.encode(), word.encode("utf-16-le"), word.encode().hex().encode()]
    return [path for path in files if any(one in path.read_bytes() for one in words)]


def test_nothing_tells_the_address_any_more(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(APP)
    services = {"shop": "shop:Shop", "mailer": "shop:Mailer"}
    for name, app in services.items():
        immortal(tmp_path, "register", name, "--peer", "tcp://127.0.0.1:*", "--app", app)
    copies = tmp_path / "copies"
    runs = [Run(tmp_path, name) for name in services]
    try:
        for run in runs:
            run.line("ready")
        with connect("shop", home=tmp_path / HOME) as client:
            client.register("ann", Personal("ann", MARKER))
            client.register("bob", Personal("bob", OTHER))
            start(client.wait, "ann")
            start(client.remember, "ann")
            start(client.read_and_wait, "bob")
            client.order("ann")
            client.order("bob")
            assert client.query.address("ann").value == MARKER
            folder = tmp_path / HOME / "mailer"
            control.query(folder, "pause", argument={"who": "eve"})
            assert "mailer is paused by eve, and would go on" in immortal(tmp_path, "forget", "ann", status=1)
            assert control.query(folder, "status")["paused"]["by"] == "eve"
            control.query(folder, "resume", argument={"who": "eve"})
            # An earlier command was killed behind its first step, and another is at work.
            assert control.query(folder, "pause", argument={"who": "ann, to forget a person"})["changed"]
            lock = open_lock(tmp_path / "keys/.lock")
            acquire_lock(lock, 0)
            assert f"process {os.getpid()} is forgetting persons" in immortal(tmp_path, "forget", "ann", status=1)
            os.close(lock)
            # Its handler could not go on from the journal: it took another way.
            refused = immortal(tmp_path, "forget", "bob", status=1)
            assert "nobody is forgotten yet: shop would not start" in refused
            assert "Shop.read_and_wait('bob')" in refused
            client.order("ann")  # it goes on
            assert not control.query(folder, "status")["paused"], "this command has ended what the killed one began"
            assert client.query.address("bob").value == OTHER
            immortal(tmp_path, "archive", "shop", "--to", f"file://{copies}/archive", "--once")
            immortal(tmp_path, "log", "backup", "shop", str(copies / "backup"))
            assert "shop is up again" in immortal(tmp_path, "forget", "ann")
        with connect("shop", home=tmp_path / HOME) as client:
            assert client.query.address("ann").value is None
            assert client.query.address("bob").value == OTHER
            client.register("ann", Personal("ann", MARKER))
            client.order("ann")
            client.go(Personal("bob", OTHER))
            state = client.query.state()
        assert state[0] == [4, 0], "what waited has the address in no variable any more"
        assert {customer: note.value for customer, note in state[2].items()} == {"ann": OTHER}
        again = immortal(tmp_path, "forget", "ann")
        assert again.startswith("ann is forgotten already, since 20"), again
        assert "no key of 'eve'" in immortal(tmp_path, "forget", "eve", status=1)
        listed = json.loads(immortal(tmp_path, "forget", "--list", "--json"))
        assert (list(listed["forgotten"]), listed["known"]) == (["ann"], 1)

        runs[0].kill()
        assert "shop is stopped, without a checkpoint of its last" in immortal(tmp_path, "forget", "bob", status=1)
        runs[0] = Run(tmp_path, "shop")
        runs[0].line("ready")
        with connect("shop", home=tmp_path / HOME) as client:
            assert client.query.state() == state, "after a recovery"
        immortal(tmp_path, "checkpoint", "shop")
        immortal(tmp_path, "verify", "shop")  # from the forgetting on
        told = immortal(tmp_path, "verify", "shop", "--all", status=3)
        assert "note: 'ann' was forgotten on 20" in told
        assert "NOT the same, but only where handlers ask for data of forgotten persons" in told
        assert "state: the same" in told
        assert "DIVERGED" not in told
        told = immortal(tmp_path, "verify", "mailer", "--all", status=3)
        assert f"letters[0]: then {len(MARKER)}, now 0" in told
        assert "'ann' was forgotten on" in immortal(tmp_path, "what-if", "shop", "--app", "shop:Shop")
        fleet = "what-if", "--fleet", "--change", "shop=shop:Shop"
        refused = immortal(tmp_path, *fleet, status=1)
        assert refused.startswith("error: shop: 'ann' was forgotten on 20"), refused
        assert "its calls are not those of the log" in refused
        assert "no difference" in immortal(tmp_path, *fleet, "--from", "2999-01-01")
        for shown in (
            immortal(tmp_path, "log", "show", "shop"),
            immortal(tmp_path, "sql", "select * from messages", "--json"),
            immortal(tmp_path, "sql", "select * from shop.addresses", "--json"),
            immortal(tmp_path, "log", "show", "shop", "--app", "shop:Shop"),
        ):
            assert re.search(r"forgotten on 20..-..-..: 'ann'", shown), shown
            assert re.search(r"personal: 'bob' [0-9a-f]{8}", shown), shown
    finally:
        for run in runs:
            run.kill()
    for word in (MARKER, OTHER):
        assert telling(word, tmp_path / HOME, copies, tmp_path / "keys") == []
