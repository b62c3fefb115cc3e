"""Apps whose calls are read with typed columns: three versions of one handler, and a handler with all types."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Literal, NamedTuple
from uuid import UUID

import msgspec

from immortal import Immortal, impulse, rpc, upgrades
from immortal.appsdk.handlers.decorators import method_id_of_name


class Color(enum.Enum):
    RED = "red"


class Place(NamedTuple):
    row: int
    shelf: str


@dataclass
class Part:
    name: str
    price: Decimal
    parts: list[Part] | None = None


class Tag(msgspec.Struct, array_like=True):
    key: str
    weight: float | None = None


class Till(Immortal):
    @rpc
    def sell(self, item: str, n: int, kind: int = 1) -> None: ...

    @impulse
    def all_types(
        self,
        flag: bool,
        ratio: float,
        data: bytes,
        at: datetime,
        day: date,
        hour: time,
        took: timedelta,
        number: UUID,
        color: Color | None,
        mode: Literal["a", "b"],
        price: int | float,
        part: Part,
        place: Place,
        tags: set[str],
        pair: tuple[int, str],
        marks: tuple[Tag, ...],
        stock: dict[str, list[int]],
        counts: Counter[str],
        anything: Any,
        either: str | int,
        source: str,
    ) -> None: ...


class Other(Immortal):
    @rpc
    def ping(self) -> None: ...


@upgrades(Till)
class Till2(Immortal):
    @rpc
    def sell(self, item: str, count: float, kind: str = "") -> None: ...

    @classmethod
    def upgrade(cls, old: Till) -> Till2:
        return cls()


SELL = method_id_of_name("sell")
ALL_TYPES = method_id_of_name("all_types")
