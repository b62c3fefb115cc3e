"""Saga with compensation: a trip is booked whole, or what was booked of it is cancelled.

Use it where one action needs several services, and there is no transaction around them. Each service is called once; if
one refuses, or the booking is cancelled, those before are undone in reverse, also when any process dies in between.

immortal dev saga.py
immortal call trips book ann-lisbon
immortal executions trips
"""

from contextlib import AsyncExitStack

from immortal import Immortal, peer, rpc


class SoldOut(Exception):  # noqa: N818 (what happened)
    """Raised when nothing is left. Argument: the trip."""


class Flights(Immortal):
    left: int
    booked: list[str]

    def __init__(self) -> None:
        self.left, self.booked = 10, []

    @rpc(raises=[SoldOut])
    def book(self, trip: str) -> None:
        if self.left == 0:
            raise SoldOut(trip)
        self.left -= 1
        self.booked.append(trip)

    @rpc
    def cancel(self, trip: str) -> None:
        if trip in self.booked:  # else the booking was refused: a compensation must bear that
            self.booked.remove(trip)
            self.left += 1


class Hotels(Flights):
    """Books rooms as Flights books seats."""


class Trips(Immortal):
    flights = peer(Flights, "flights")
    hotels = peer(Hotels, "hotels")

    @rpc(raises=[SoldOut])
    async def book(self, trip: str) -> str:
        async with AsyncExitStack() as undo:
            for supplier in (self.flights, self.hotels):
                undo.push_async_callback(supplier.cancel, trip)  # before the call, which nothing takes back
                await supplier.book(trip)
            undo.pop_all()  # all is booked: nothing is undone
        return f"{trip} is booked"
