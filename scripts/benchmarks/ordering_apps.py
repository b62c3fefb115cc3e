"""What ordered multicasts are measured with: one sender, and up to 16 destinations that count."""

from __future__ import annotations

import time
from statistics import median

from immortal import Immortal, peer, query, rpc

DESTINATIONS_MAX = 16


class Stopwatch:
    """No part of the state: a replay measures nothing."""

    def __init__(self) -> None:
        self.latencies_ns: list[int] = []
        self.clock_ns = time.perf_counter_ns

    def note(self, latency_ns: int) -> None:
        self.latencies_ns.append(latency_ns)


_stopwatch = Stopwatch()


class Sink(Immortal):
    count: int

    def __init__(self) -> None:
        self.count = 0

    @rpc
    def note(self, number: int) -> int:
        self.count += 1
        return number

    @query
    def counted(self) -> int:
        return self.count


class Fan(Immortal):
    for _number in range(DESTINATIONS_MAX):
        locals()[f"d{_number}"] = peer(Sink, f"d{_number}")
    begun: int

    def __init__(self) -> None:
        self.begun = 0

    def sinks(self, destinations: int) -> list[type[Sink]]:
        return [getattr(self, f"d{number}") for number in range(destinations)]

    @rpc
    def burst(self, count: int, destinations: int, ordered: bool) -> None:
        sinks = self.sinks(destinations)
        if ordered:
            all_of_them = self.multicast(sinks)
            for number in range(count):
                all_of_them.note.fork(number)
            return
        for number in range(count):
            for sink in sinks:
                sink.note.fork(number)

    @rpc
    async def ask(self, count: int, destinations: int, ordered: bool) -> None:
        """One after the other."""
        sinks, clock_ns, note = self.sinks(destinations), _stopwatch.clock_ns, _stopwatch.note
        for number in range(count):
            begun_ns = clock_ns()
            if ordered:
                await self.multicast(sinks).note.all(number)
            else:
                await self.gather(*(sink.note(number) for sink in sinks))
            note(clock_ns() - begun_ns)

    @rpc
    def note(self, number: int) -> int:
        return number

    @rpc
    async def ask_with_itself(self, count: int) -> None:
        """As ask, to one other and itself: all rounds, between no more processes than a plain call has."""
        both: list[type[Sink | Fan]] = [*self.sinks(1), type(self)]
        clock_ns, note = _stopwatch.clock_ns, _stopwatch.note
        for number in range(count):
            begun_ns = clock_ns()
            await self.multicast(both).note.all(number)
            note(clock_ns() - begun_ns)

    @rpc
    async def ask_one(self, count: int) -> None:
        """Plain awaited calls of one destination."""
        (sink,), clock_ns, note = self.sinks(1), _stopwatch.clock_ns, _stopwatch.note
        for number in range(count):
            begun_ns = clock_ns()
            await sink.note(number)
            note(clock_ns() - begun_ns)

    @query
    def p50_us(self) -> float:
        """Of what was awaited since it was asked last."""
        latencies_ns, _stopwatch.latencies_ns = _stopwatch.latencies_ns, []
        return median(latencies_ns or [0]) / 1000
