"""Command sql: DuckDB runs a query over logs and states, as of now or of an earlier moment."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from immortal.cli.options import Moment, complete_instance, instance_names, pass_registry, trust_pickle_option
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.log.identity import MomentError, Time
from immortal.pipeline.sql.opening import open_sql, wrong_query
from immortal.presenters.records import cell
from immortal.protocol.command_line import FailedError, counted, echo, echo_json, print_table
from immortal.protocol.safe_output import printable

if TYPE_CHECKING:
    from immortal.pipeline.sql.database import Database


ROWS_SHOWN_MAX = 1_000  # in a table for people
_ROWS_AT_ONCE = 1_000
_ROWS_OF_A_GROUP = 100_000  # of a Parquet file


@click.command()
@click.argument("query")
@click.option(
    "-i",
    "--instance",
    "names",
    metavar="NAME",
    multiple=True,
    callback=instance_names,
    shell_complete=complete_instance,
    help="Instance to query; repeatable.  [default: all that have a log]",
)
@click.option("--at", type=Moment(), help="Moment to query: a time (UTC by default), or a record if one -i is given.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, an object for each row.")
@click.option(
    "--parquet", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write a Parquet file."
)
@click.option(
    "--unsealed", is_flag=True, help="Allow the query to read and write files, and to load DuckDB extensions."
)
@trust_pickle_option
@pass_registry
def sql(
    registry: Registry,
    query: str,
    names: tuple[str, ...],
    at: int | Time | None,
    as_csv: bool,
    as_json: bool,
    parquet: Path | None,
    unsealed: bool,
    trust_pickle: bool,
) -> None:
    """Run an SQL query over logs and states; running instances are not disturbed.

    Tables: messages, records, outputs, instances, clients, executions, waiting, timers and effects; for each instance,
    its state (NAME) and the content of each container in it (NAME.ATTRIBUTE). All tables show the same moment: no
    effect without its cause. States come from a replay. Without --unsealed, a query can't access files.
    """
    if as_csv + as_json + (parquet is not None) > 1:
        raise click.UsageError("give one of --csv, --json and --parquet")
    if parquet is not None and parquet.exists():
        raise FailedError(f"{parquet} is there already: give another name, or remove it first")
    try:
        with open_sql(registry, names, at, query, trust_pickle=trust_pickle, unsealed=unsealed) as database:
            if not unsealed:
                database.seal()
            _run(database, query, as_csv=as_csv, as_json=as_json, parquet=parquet)
    except MomentError as error:
        raise click.UsageError(f"--at {error}") from None


def _run(database: Database, query: str, *, as_csv: bool, as_json: bool, parquet: Path | None) -> None:
    import duckdb

    try:
        found = database.run(query)
        if found is None:
            raise FailedError("the query returns no rows: a query such as select was expected")
        if parquet is not None:
            echo(f"{counted(_write_parquet(found, parquet), 'row')} in {parquet}")
            return
        columns = found.columns
        rows = _rows(found)
        if as_csv:
            _print_csv(columns, rows)
        elif as_json:
            for row in rows:
                echo_json({name: _json_value(value) for name, value in zip(columns, row, strict=True)})
        else:
            _print_rows(columns, rows)
    except duckdb.PermissionException as error:
        raise FailedError(f"{error}\na query can't access files: --unsealed lets it") from None
    except duckdb.Error as error:
        raise wrong_query(error) from None


def _write_parquet(found: Any, path: Path) -> int:
    """Write the rows to a Parquet file, whole or not at all; return their number. Raises FailedError."""
    from pyarrow.parquet import ParquetWriter

    partial, count = path.with_name(f".{path.name}.partial"), 0
    try:
        batches = found.to_arrow_reader(_ROWS_OF_A_GROUP)
        with ParquetWriter(partial, batches.schema, compression="zstd") as writer:
            for batch in batches:
                writer.write_batch(batch)
                count += batch.num_rows
        partial.rename(path)
    except OSError as error:
        raise FailedError(f"{path} can't be written: {error.strerror or error}") from None
    finally:
        partial.unlink(missing_ok=True)
    return count


def _rows(found: Any) -> Iterator[tuple[Any, ...]]:
    while some := found.fetchmany(_ROWS_AT_ONCE):
        yield from some


def _print_rows(columns: Sequence[str], rows: Iterator[tuple[Any, ...]]) -> None:
    shown: list[list[str]] = []
    more = False
    for row in rows:
        if len(shown) == ROWS_SHOWN_MAX:
            more = True
            break
        shown.append([cell(value) for value in row])
    print_table([printable(name) for name in columns], shown)
    if more:
        echo(f"... only the first {ROWS_SHOWN_MAX:,} are shown: --json, --csv and --parquet give all", err=True)


def _print_csv(columns: Sequence[str], rows: Iterator[tuple[Any, ...]]) -> None:
    """Print CSV as RFC 4180 says; control characters are escaped if stdout is a terminal."""
    import csv

    shown = printable if sys.stdout.isatty() else str
    writer = csv.writer(sys.stdout)
    writer.writerow([shown(name) for name in columns])
    for row in rows:
        writer.writerow(["" if v is None else shown(v.hex() if isinstance(v, bytes) else str(v)) for v in row])


def _json_value(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if value - value == 0 else {"$float": repr(value)}
    if isinstance(value, bytes):
        return {"$bytes": value.hex()}
    if isinstance(value, dict):
        return {str(key): _json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in value]
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
