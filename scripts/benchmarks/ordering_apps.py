"""What ordered multicasts are measured with: one sender, and up to 16 destinations that count."""

from __future__ import annotations

from appsdk import Immortal, peer, query, rpc

DESTINATIONS_MAX = 16


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
        sinks = self.sinks(destinations)
        for number in range(count):
            if ordered:
                await self.multicast(sinks).note.all(number)
            else:
                await self.gather(*(sink.note(number) for sink in sinks))

    @rpc
    async def ask_one(self, count: int) -> None:
        """Plain awaited calls of one destination."""
        (sink,) = self.sinks(1)
        for number in range(count):
            await sink.note(number)
