"""What the services do while they are killed, and what shows that each call was executed exactly once."""

from __future__ import annotations

import importlib
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import msgspec

from immortal.appsdk.state.schema import decode_envelope
from immortal.client import NotConnectable, connect, with_key
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.log.backend import Severity
from immortal.coordinator.log.verify import verify_log
from immortal.log import open_reader
from tests.soak.service import APP, DEADLINE_S, SUPERVISOR, Run, Service, SoakError, wait_for

EXAMPLES = Path(__file__).parents[2] / "examples"


class Workload(Protocol):
    """One example. Input comes a little at a time, so that there is work at every kill."""

    services: list[Service]

    def feed(self) -> None:
        """More input. It need not be read before the next restart."""

    def settle(self) -> None:
        """All services run, and all input has gone through. Raises SoakError."""

    def check(self) -> str:
        """Once all are stopped: what was compared, in words. Raises SoakError where a count is wrong."""


class WordCount:
    """examples/wordcount: Reader is fed with lines, Counter counts their words."""

    LINES_AT_ONCE = 300
    VOCABULARY = (*(f"word{number}" for number in range(300)), "zähler", "x" * 300)

    def __init__(
        self, folder: Path, rng: random.Random, environment: Mapping[str, str] | None = None, **settings: Any
    ) -> None:
        """``environment``: of its processes; ``settings``: of its instances, with {name} for theirs."""
        self._folder, self._rng = folder, rng
        self._listing = folder / "files.txt"
        self._parts: list[Path] = []
        self._words: Counter[str] = Counter()
        self._line_count = 0
        registry = Registry(folder / "registry")
        run_environment = {"WORDCOUNT_FILES": str(self._listing), **(environment or {})}
        self.services = [
            Service(
                registry.register(
                    name,
                    "tcp://127.0.0.1:*",
                    keep_log_mb=0,  # it is killed while it trims
                    **{key: value.format(name=name) for key, value in settings.items()},
                ),
                Run(f"wordcount:{class_name}", EXAMPLES / "wordcount", run_environment),
                folder,
            )
            for name, class_name in (("counter", "Counter"), ("reader", "Reader"))
        ]
        self.feed()

    def feed(self) -> None:
        lines = [
            " ".join(self._rng.choices(self.VOCABULARY, k=self._rng.randrange(6))) for _ in range(self.LINES_AT_ONCE)
        ]
        part = self._folder / f"part{len(self._parts)}.txt"
        part.write_text("\n".join(lines) + "\n")
        self._parts.append(part)
        for line in lines:
            self._words.update(line.split())
        self._line_count += len(lines)
        temporary = self._listing.with_suffix(".new")
        temporary.write_text("".join(f"{path}\n" for path in self._parts))
        temporary.replace(self._listing)

    def settle(self) -> None:
        counter, reader = self.services
        wait_for(lambda: counter.ready and reader.ready, lambda: f"both are ready\n{counter.tail()}\n{reader.tail()}")
        reader.kill(APP)  # it reads the list of its input only when it starts
        total = self._line_count

        def is_complete() -> bool:
            sent = reader.status().get("outputs", {}).get("counter", {})
            taken = counter.status().get("inputs", {}).get("reader", {})
            return bool(
                counter.ready
                and reader.ready
                and sent.get("position") == sent.get("acknowledged") == taken.get("position") == total
            )

        wait_for(
            is_complete, lambda: f"{total} lines are counted: {reader.status()}\n{reader.tail()}\n{counter.status()}"
        )

    def check(self) -> str:
        counter, reader = (final_state(service.name, service.settings.log) for service in self.services)
        if counter["words"] != dict(self._words):
            different = {
                word: (counter["words"].get(word, 0), self._words.get(word, 0))
                for word in counter["words"].keys() | self._words.keys()
                if counter["words"].get(word, 0) != self._words.get(word, 0)
            }
            raise SoakError(f"words counted, and expected: {different}")
        if reader["lines"] != self._line_count:
            raise SoakError(f"{reader['lines']} lines were read, {self._line_count} expected")
        return f"{self._line_count:,} lines, {self._words.total():,} words: equal"


def final_state(name: str, log: str) -> dict[str, Any]:
    """The state in the last checkpoint, which a clean stop takes; the log is sound. Raises SoakError."""
    verification = verify_log(log, name)
    problems = [finding.message for finding in verification.findings() if finding.severity is not Severity.NOTE]
    if problems:
        raise SoakError(f"the log of {name} is not sound: {problems}")
    with open_reader(log, name) as reader:
        summary = reader.summary()
        newest = summary.checkpoints[-1]
        if newest.sequence_id != summary.last_sequence_id:
            raise SoakError(
                f"the last checkpoint of {name} is of record {newest.sequence_id}, its last record is"
                f" {summary.last_sequence_id}"
            )
        blob = b"".join(reader.checkpoint_chunks(newest.checkpoint_id))
    state: dict[str, Any] = msgspec.msgpack.decode(decode_envelope(blob)[1])
    return state


class Bank:
    """examples/bank: a teller moves money between three banks, with calls that wait for answers."""

    TRANSFERS_AT_ONCE = 100

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self._books = module_of("run", EXAMPLES / "bank")
        self._home = folder / "registry"
        self._seed = rng.randrange(1000)
        self._transfers = 0
        self._environment = {"BANK_SEED": str(self._seed)}
        registry = Registry(self._home)
        self.services = [
            Service(
                registry.register(name, "tcp://127.0.0.1:*"), Run(app, EXAMPLES / "bank", self._environment), folder
            )
            for name, app in self._books.APPS.items()
        ]
        self.feed()

    def feed(self) -> None:
        """The teller hears of more transfers when its supervisor is started."""
        self._transfers += self.TRANSFERS_AT_ONCE
        self._environment["BANK_TRANSFERS"] = str(self._transfers)

    def settle(self) -> None:
        teller = next(service for service in self.services if service.name == self._books.TELLER)
        teller.kill(SUPERVISOR)

        def is_complete() -> bool:
            return all(service.ready for service in self.services) and settled in teller.messages

        settled = f"settled: {self._transfers}"
        wait_for(is_complete, lambda: f"{self._transfers} transfers are settled\n{teller.tail()}")

    def check(self) -> str:
        states = {service.name: self._state(service) for service in self.services}
        problems = self._books.problems_of(states, self._transfers, self._seed)
        if problems:
            raise SoakError(f"the books are wrong: {problems[:10]}")
        return f"{self._transfers:,} transfers: the books are right"

    def _state(self, service: Service) -> Any:
        final_state(service.name, service.settings.log)
        return self._books.supervised.final_state(self._home, service.name, self._books.FOLDER)


class Shop:
    """examples/http: orders with an idempotency key, each from a client of its own."""

    ORDERS_AT_ONCE = 200
    THREADS = 8
    TIMEOUT_S = 180.0  # the shop may be down for most of it
    WAITING_MAX = 800

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self._shop = module_of("shop", EXAMPLES / "http")
        self._home = folder / "registry"
        settings = Registry(self._home).register("shop", "tcp://127.0.0.1:*")
        self.services = [Service(settings, Run("shop:Shop", EXAMPLES / "http", {}), folder)]
        self._ordering = ThreadPoolExecutor(self.THREADS)
        self._receipts: dict[str, Future[int]] = {}
        self.feed()

    def feed(self) -> None:
        if sum(not receipt.done() for receipt in self._receipts.values()) > self.WAITING_MAX:
            return
        for _ in range(self.ORDERS_AT_ONCE):
            number = str(len(self._receipts))
            self._receipts[number] = self._ordering.submit(self._order, number)

    def _order(self, number: str) -> int:
        deadline_s = time.monotonic() + self.TIMEOUT_S
        while True:
            try:
                with connect(self._shop.Shop, "shop", home=self._home, timeout=self.TIMEOUT_S) as shop:
                    receipt: int = with_key(shop, f"order-{number}").place(number, "book")
                    return receipt
            except NotConnectable:  # nobody runs it: it was not sent
                if time.monotonic() > deadline_s:
                    raise

    def settle(self) -> None:
        (shop,) = self.services

        def is_complete() -> bool:
            return shop.ready and all(receipt.done() for receipt in self._receipts.values())

        try:
            wait_for(is_complete, lambda: f"{self._waiting()} are answered\n{shop.tail()}", self.TIMEOUT_S + DEADLINE_S)
        finally:
            self._ordering.shutdown(wait=False, cancel_futures=True)

    def _waiting(self) -> str:
        waiting = [number for number, receipt in self._receipts.items() if not receipt.done()]
        return f"of {len(self._receipts)} orders the last {len(waiting)} ({', '.join(waiting[:8])} ...)"

    def check(self) -> str:
        (shop,) = self.services
        taken = final_state(shop.name, shop.settings.log)["orders"]
        unanswered = [str(error) for receipt in self._receipts.values() if (error := receipt.exception()) is not None]
        if unanswered:
            raise SoakError(f"{len(unanswered)} orders were not answered: {unanswered[:3]}")
        expected = {number: [receipt.result()] for number, receipt in self._receipts.items()}
        if taken != expected:
            wrong = {number: (taken.get(number), one) for number, one in expected.items() if taken.get(number) != one}
            raise SoakError(f"orders taken, and answered: {wrong or taken.keys() - expected.keys()}")
        return f"{len(taken):,} orders: each was taken once"


def module_of(name: str, folder: Path) -> Any:
    """A module of an example, which imports others of its folder."""
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))


WORKLOADS: dict[str, Callable[[Path, random.Random], Workload]] = {"bank": Bank, "shop": Shop, "wordcount": WordCount}
