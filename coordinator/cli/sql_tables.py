"""``python -m immortal.coordinator.cli.sql_tables``: tables of `immortal sql` as Parquet files, all of one moment.

For other programs; :mod:`pipeline.views` runs it. Its order is JSON on stdin, with ``tables`` by name, and ``folder``,
which gets a file for each: NAME.parquet. Status 1 with a line on stderr: it could not be done.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click
import msgspec

from immortal.coordinator.cli.moments import Moment, Time
from immortal.coordinator.cli.sql import opened, wrong_query
from immortal.coordinator.instances.registry import Registry
from immortal.protocol import decoding
from immortal.protocol.command_line import FailedError
from immortal.protocol.errors import ImmortalError


class Order(msgspec.Struct, frozen=True):
    """``at`` "": now. ``names`` (): all instances that have a log. ``tables``: as a query names them."""

    home: str
    folder: str
    tables: tuple[str, ...]
    at: str = ""
    names: tuple[str, ...] = ()


def write_tables(order: Order) -> None:
    """Raises ImmortalError, click.ClickException, OSError."""
    at: int | Time | None = Moment().convert(order.at, None, None) if order.at else None
    quoted = {table: _quoted(table) for table in order.tables}
    with opened(Registry(order.home), order.names, at, f"from {', '.join(quoted.values())}") as database:
        import duckdb

        for table, name in quoted.items():
            try:
                found = database.connection.sql(f"from {name}")
                found.write_parquet(str(Path(order.folder, f"{table}.parquet")), compression="zstd")
            except duckdb.Error as error:
                raise wrong_query(error) from None


def _quoted(table: str) -> str:
    """``service-0.words`` as SQL has it."""
    return ".".join('"' + part.replace('"', '""') + '"' for part in table.split("."))


def main() -> None:
    try:
        write_tables(decoding.decode_json(sys.stdin.buffer.read(), type=Order))
    except (ImmortalError, OSError) as error:
        FailedError(str(error)).show()
        sys.exit(1)
    except click.ClickException as error:
        FailedError(error.format_message()).show()
        sys.exit(1)


if __name__ == "__main__":
    main()
