"""Multicasts in one order, by destinations; beside them the same fan-out without an order, and a sequencer."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from immortal.bench.harness import IMMORTAL, Context, Figure, Target, rate
from immortal.bench.processes import BenchError, read_line, register, running, start_module, write_line
from immortal.bench.workload import Measured
from immortal.client import connect
from scripts.benchmarks.apps import Fan, Sink
from scripts.benchmarks.rivals.servers import postgres
from tests.helpers.postgres import binaries

SEQUENCER = "sequencer (postgresql)"
SCHEMA = """
CREATE TABLE sequencer (last bigint NOT NULL);
INSERT INTO sequencer VALUES (0);
CREATE TABLE messages (number bigint PRIMARY KEY, data bytea NOT NULL)
"""
_POLL_S = 0.001
_WAIT_S = 120.0


class Sequencer:
    """Sequencer in PostgreSQL, with ``receivers`` processes that read."""

    def __init__(self, stack: contextlib.ExitStack, url: str, receivers: int) -> None:
        import psycopg

        self._connection = stack.enter_context(psycopg.connect(url, autocommit=True))
        self._connection.execute(SCHEMA)
        self._last = 0
        self._receivers = [stack.enter_context(start_module(__name__, url)) for _ in range(receivers)]

    def send(self, count: int) -> None:
        """Send ``count`` messages in one transaction: its row lock makes others wait for their numbers."""
        with self._connection.cursor() as cursor, self._connection.transaction():
            cursor.execute("UPDATE sequencer SET last = last + %s RETURNING last", (count,))
            row = cursor.fetchone()
            assert row is not None
            self._last = row[0]
            first = self._last - count + 1
            with cursor.copy("COPY messages FROM STDIN (FORMAT BINARY)") as copy:
                copy.set_types(["int8", "bytea"])
                for index in range(count):
                    copy.write_row((first + index, index.to_bytes(16, "big")))

    def wait(self, count: int) -> None:
        """Wait until all receivers have all messages, of which ``count`` are the last ones."""
        for receiver in self._receivers:
            write_line(receiver, str(self._last))
        for receiver in self._receivers:
            if (said := read_line(receiver, "a receiver of the sequencer")) != "done":
                raise BenchError(f"a receiver of the sequencer is {said}")


@contextlib.contextmanager
def sequencer(folder: Path, receivers: int) -> Iterator[Sequencer]:
    """Run a sequencer. Raises BenchError if there is no PostgreSQL."""
    with postgres(folder) as url, contextlib.ExitStack() as stack:
        yield Sequencer(stack, url, receivers)


def _receive(url: str) -> None:
    """Read messages in order, up to the number in each line of stdin."""
    import psycopg

    have = 0
    with psycopg.connect(url, autocommit=True) as connection:
        for line in sys.stdin:
            until, deadline_s = int(line), time.monotonic() + _WAIT_S
            while have < until and time.monotonic() < deadline_s:
                rows = connection.execute(
                    "SELECT number, data FROM messages WHERE number > %s ORDER BY number LIMIT 5000", (have,)
                ).fetchall()
                for number, _ in rows:
                    have = number
                if not rows:
                    time.sleep(_POLL_S)
            print("done" if have >= until else "late", flush=True)


# Multicasts in one order.


UNORDERED = "plain calls, no order"
ONE_CALL = "one plain awaited call"
CALLS_PER_BURST = 20_000  # a burst is answered when its last multicast has its place
AWAITED = 100
ALL_ROUNDS_NOTE = "All rounds, between the four processes of a plain call: none waits for a processor for long."
_READY_S = 60.0


def _bursts(calls: int, send: Callable[[int], Any], wait: Callable[[int], None]) -> Measured:
    """Measure multicasts in bursts, from the first to the last one that all have: ``wait`` waits for their number."""
    began_s, count = time.perf_counter(), 0
    while count < calls:
        send(CALLS_PER_BURST)
        count += CALLS_PER_BURST
    wait(count)
    return Measured(count, time.perf_counter() - began_s)


def _multicasts(calls: int, fan: Any, sinks: list[Any], *, ordered: bool) -> Measured:
    before = [sink.counted() for sink in sinks]

    def wait(count: int) -> None:
        deadline_s = time.perf_counter() + _READY_S
        for sink, had in zip(sinks, before, strict=True):
            while (seen := sink.counted() - had) < count:
                if time.perf_counter() > deadline_s:
                    raise BenchError(f"{seen} of {count} multicasts have come")

    return _bursts(calls, lambda count: fan.burst(count, len(sinks), ordered), wait)


def _awaited(
    context: Context,
    fan: Any,
    what: str,
    asks: Mapping[str, Callable[[], Any]],
    *,
    targets: list[Target],
    note: str = "",
) -> Figure:
    """Return the median latency of the AWAITED calls that each of ``asks`` makes one after the other."""

    def p50_us(ask: Callable[[], Any]) -> float:
        fan.p50_us()
        ask()
        latency_us: float = fan.p50_us()
        return latency_us

    turns = {name: partial(p50_us, ask) for name, ask in asks.items()}
    return Figure(f"{what}, awaited, p50", "µs", "lower", context.interleave(turns, what), targets, note)


def ordering(context: Context) -> list[Figure]:
    """Measure ordered multicasts by destinations, beside the same fan-out without an order and a sequencer."""
    figures = []
    for destinations in context.amounts.multicast_destinations:
        names = [f"d{number}" for number in range(destinations)]
        apps = {"fan": "scripts.benchmarks.apps:Fan", **dict.fromkeys(names, "scripts.benchmarks.apps:Sink")}
        with context.home() as home, running(register(home, apps, {})), contextlib.ExitStack() as stack:
            fan: Any = stack.enter_context(connect(Fan, "fan", home=home, timeout=_READY_S))
            sinks = [stack.enter_context(connect(Sink, name, home=home, timeout=_READY_S)) for name in names]
            fan.ask(1, destinations, ordered=True)
            what = f"multicasts to {destinations}"
            one_call = partial(fan.ask_one, AWAITED)
            asks = {
                IMMORTAL: partial(fan.ask, AWAITED, destinations, ordered=True),
                UNORDERED: partial(fan.ask, AWAITED, destinations, ordered=False),
                ONE_CALL: one_call,
            }
            # Before the bursts: after them the disk is still busy with their writes.
            targets = [Target("at most", 3, ONE_CALL)] if destinations == 3 else []
            figures.append(_awaited(context, fan, what, asks, targets=targets))
            if destinations == 3:
                asks = {IMMORTAL: partial(fan.ask_with_itself, AWAITED), ONE_CALL: one_call}
                itself = "multicasts to one other and oneself"
                figures.append(_awaited(context, fan, itself, asks, targets=targets, note=ALL_ROUNDS_NOTE))
            sides = {
                IMMORTAL: partial(_multicasts, fan=fan, sinks=sinks, ordered=True),
                UNORDERED: partial(_multicasts, fan=fan, sinks=sinks, ordered=False),
            }
            if binaries() is not None:
                rival = stack.enter_context(sequencer(context.folder, destinations))
                sides[SEQUENCER] = partial(_bursts, send=rival.send, wait=rival.wait)
            targets = [Target("at least", 50_000)] if destinations == 3 else []
            what = f"{what}, one-way"
            results = context.compare(what, sides, first_calls=CALLS_PER_BURST)
            figures.append(rate(what, results, targets, unit="multicasts/s"))
    return figures


if __name__ == "__main__":
    _receive(sys.argv[1])
