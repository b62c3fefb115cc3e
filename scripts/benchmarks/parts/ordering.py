"""Multicasts in one order, by destinations; beside them the same fan-out without an order, and a sequencer."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from immortal.bench.processes import BenchError, hear, start_module, tell
from immortal.client import connect
from scripts.benchmarks.apps import Fan, Sink
from scripts.benchmarks.context import Context, start_service
from scripts.benchmarks.figures import IMMORTAL, Figure, Target
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
        self._receivers = [stack.enter_context(start_module(__name__, url)) for _ in range(receivers)]

    def send(self, count: int) -> None:
        """Send ``count`` messages in one transaction: its row lock makes others wait for their numbers."""
        with self._connection.cursor() as cursor, self._connection.transaction():
            cursor.execute("UPDATE sequencer SET last = last + %s RETURNING last", (count,))
            row = cursor.fetchone()
            assert row is not None
            first = row[0] - count + 1
            with cursor.copy("COPY messages FROM STDIN (FORMAT BINARY)") as copy:
                copy.set_types(["int8", "bytea"])
                for index in range(count):
                    copy.write_row((first + index, index.to_bytes(16, "big")))

    def last(self) -> int:
        row = self._connection.execute("SELECT last FROM sequencer").fetchone()
        assert row is not None
        last: int = row[0]
        return last

    def wait(self) -> None:
        """Wait until all receivers have all messages."""
        last = self.last()
        for receiver in self._receivers:
            tell(receiver, str(last))
        for receiver in self._receivers:
            if (said := hear(receiver, "a receiver of the sequencer")) != "done":
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


@contextlib.contextmanager
def _running(home: Path, destinations: int) -> Iterator[None]:
    apps = {"fan": "Fan"} | {f"d{number}": "Sink" for number in range(destinations)}
    with contextlib.ExitStack() as stack:
        for name, cls in apps.items():
            start_service(stack, home, name, f"scripts.benchmarks.apps:{cls}")
        yield


def _rate(fan: Any, sinks: list[Any], seconds: float, *, ordered: bool) -> float:
    """Measure multicasts/s, from the first to the last one that all have counted."""
    before = [sink.counted() for sink in sinks]
    began_s = time.perf_counter()
    count = 0
    while time.perf_counter() - began_s < seconds:
        fan.burst(CALLS_PER_BURST, len(sinks), ordered)
        count += CALLS_PER_BURST
    for sink, had in zip(sinks, before, strict=True):
        while (seen := sink.counted() - had) < count:
            if time.perf_counter() - began_s > _READY_S:
                raise BenchError(f"{seen} of {count} multicasts have come")
    return count / (time.perf_counter() - began_s)


def _sequenced(rival: Sequencer, seconds: float) -> float:
    """Measure the rival's rate as _rate does: one transaction for as many calls as a burst has."""
    began_s = time.perf_counter()
    count = 0
    while time.perf_counter() - began_s < seconds:
        rival.send(CALLS_PER_BURST)
        count += CALLS_PER_BURST
    rival.wait()
    return count / (time.perf_counter() - began_s)


def _p50_us(fan: Any, ask: Callable[[], Any]) -> float:
    """Return the median latency of the AWAITED calls that ``ask`` makes one after the other; in µs."""
    fan.p50_us()
    ask()
    latency_us: float = fan.p50_us()
    return latency_us


def ordering(context: Context) -> list[Figure]:
    """Measure ordered multicasts by destinations, beside the same fan-out without an order and a sequencer."""
    figures = []
    for destinations in context.amounts.multicast_destinations:
        with context.home() as home, _running(home, destinations), contextlib.ExitStack() as stack:
            fan: Any = stack.enter_context(connect(Fan, "fan", home=home, timeout=_READY_S))
            sinks = [
                stack.enter_context(connect(Sink, f"d{number}", home=home, timeout=_READY_S))
                for number in range(destinations)
            ]
            fan.ask(1, destinations, ordered=True)
            # After bursts the disk is still busy with their writes.
            what = f"multicasts to {destinations}, awaited, p50"
            asks = {
                IMMORTAL: partial(_p50_us, fan, partial(fan.ask, AWAITED, destinations, ordered=True)),
                UNORDERED: partial(_p50_us, fan, partial(fan.ask, AWAITED, destinations, ordered=False)),
                ONE_CALL: partial(_p50_us, fan, partial(fan.ask_one, AWAITED)),
            }
            targets = [Target("at most", 3, ONE_CALL)] if destinations == 3 else []
            figures.append(Figure(what, "µs", "lower", context.interleave(asks, what), targets))
            if destinations == 3:
                figures.append(_all_rounds(context, fan))
            what = f"multicasts to {destinations}, one-way"
            turns = {
                IMMORTAL: partial(_rate, fan, sinks, context.amounts.seconds, ordered=True),
                UNORDERED: partial(_rate, fan, sinks, context.amounts.seconds, ordered=False),
            }
            if binaries() is not None:
                rival = stack.enter_context(sequencer(context.folder, destinations))
                turns[SEQUENCER] = partial(_sequenced, rival, context.amounts.seconds)
            targets = [Target("at least", 50_000)] if destinations == 3 else []
            figures.append(Figure(what, "multicasts/s", "higher", context.interleave(turns, what), targets))
    return figures


def _all_rounds(context: Context, fan: Any) -> Figure:
    what = "multicasts to one other and oneself, awaited, p50"
    asks = {
        IMMORTAL: partial(_p50_us, fan, partial(fan.ask_with_itself, AWAITED)),
        ONE_CALL: partial(_p50_us, fan, partial(fan.ask_one, AWAITED)),
    }
    targets = [Target("at most", 3, ONE_CALL)]
    return Figure(what, "µs", "lower", context.interleave(asks, what), targets, note=ALL_ROUNDS_NOTE)


if __name__ == "__main__":
    _receive(sys.argv[1])
