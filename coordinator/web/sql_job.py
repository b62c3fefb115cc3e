"""``python -m immortal.coordinator.web.sql_job``: one query of `immortal sql`, in a process of its own.

Its order is JSON on stdin. What comes out is one line of JSON: {"found": {...}} or {"error": TEXT}.
"""

from __future__ import annotations

import os
import resource
import sys
from typing import Any

import click
import msgspec

from immortal.coordinator.cli.moments import Moment, Time
from immortal.coordinator.cli.sql import cell, opened, wrong_query
from immortal.coordinator.instances.registry import Registry
from immortal.protocol import decoding
from immortal.protocol.errors import ImmortalError

ROWS_SHOWN_MAX = 500
CELL_CHARACTERS_MAX = 300
MEMORY_MB = 2048  # of the process; a query may have half of it


class Order(msgspec.Struct, frozen=True):
    """``at`` "": now. ``names`` (): all instances that have a log."""

    home: str
    query: str
    at: str = ""
    names: tuple[str, ...] = ()


class Found(msgspec.Struct):
    """``cuts``: (instance, its last record that was shown)."""

    columns: list[str]
    rows: list[list[str]]
    has_more: bool
    cuts: list[tuple[str, int]]


def run(order: Order) -> Found:
    """Raises ImmortalError, click.ClickException."""
    at: int | Time | None = Moment().convert(order.at, None, None) if order.at else None
    with opened(Registry(order.home), order.names, at, order.query) as database:
        import duckdb

        database.seal(MEMORY_MB // 2)
        try:
            statements = database.connection.extract_statements(order.query)
            if [one.type for one in statements] != [duckdb.StatementType.SELECT]:
                raise click.ClickException("one query that only reads was expected, such as select ... from ...")
            made = database.connection.sql(order.query)
            rows = made.fetchmany(ROWS_SHOWN_MAX + 1)
        except duckdb.Error as error:
            raise wrong_query(error) from None
        return Found(
            [_clipped(name) for name in made.columns],
            [[_clipped(cell(value)) for value in row] for row in rows[:ROWS_SHOWN_MAX]],
            len(rows) > ROWS_SHOWN_MAX,
            [(name, cut.last) for name, cut in database.cuts.items()],
        )


def _clipped(text: str) -> str:
    """As JSON can carry it, too: half a surrogate pair is no text."""
    shown = text if len(text) <= CELL_CHARACTERS_MAX else f"{text[: CELL_CHARACTERS_MAX - 1]}…"
    return shown.encode("utf-8", "replace").decode()


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what users' classes print
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_MB << 20, MEMORY_MB << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answer: dict[str, Any]
    try:
        answer = {"found": run(decoding.decode_json(sys.stdin.buffer.read(), type=Order))}
    except MemoryError:
        answer = {"error": f"it needs more than {MEMORY_MB} MiB of memory"}
    except (ImmortalError, OSError) as error:
        answer = {"error": str(error)}
    except click.ClickException as error:
        answer = {"error": error.format_message()}
    answers.write(msgspec.json.encode(answer) + b"\n")
    answers.flush()


if __name__ == "__main__":
    main()
