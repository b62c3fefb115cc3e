"""sql: a query over logs and states, as of now or of a moment, by DuckDB."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from immortal.cli.options import Moment, Time, complete_instance, instance_name, pass_registry, trust_pickle_option
from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.instances import own_logs
from immortal.coordinator.instances.registry import Registry, RegistryError
from immortal.coordinator.log import log_exists
from immortal.protocol import decoding
from immortal.protocol.command_line import FailedError, counted, echo, echo_json, print_table
from immortal.protocol.errors import ImmortalError
from immortal.protocol.safe_output import printable

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

    from immortal.coordinator.core.formatting import Methods
    from immortal.pipeline.arguments import ArgumentDecoder
    from immortal.pipeline.sql.database import Database, Decode, Log


ROWS_SHOWN_MAX = 1_000  # as a table, for people
_ROWS_AT_ONCE = 1_000
_ROWS_OF_A_GROUP = 100_000  # of a Parquet file


def _names(ctx: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> tuple[str | None, ...]:
    return tuple(instance_name(ctx, parameter, one) for one in dict.fromkeys(value))


@click.command()
@click.argument("query")
@click.option(
    "-i", "--instance", "names", multiple=True, callback=_names, shell_complete=complete_instance, metavar="NAME",
    help="Only this one, and others that are given so.  [default: all that have a log]",
)  # fmt: skip
@click.option("--at", type=Moment(), help="As of then: a time (UTC unless it says), or a record of the only instance.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, an object for each row.")
@click.option(
    "--parquet", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write a Parquet file."
)
@click.option("--unsealed", is_flag=True, help="Let the query read and write files, and load DuckDB's extensions.")
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
    """Run a QUERY over logs and states; the instances may run, and notice nothing.

    Tables are messages, records, outputs, instances, clients; waiting, timers, effects; and of each instance its state
    (NAME), and what is in an attribute that is a container (NAME.ATTRIBUTE). All is of one moment: no effect is shown
    without its cause. States are had by replay. A query reaches these tables alone, and no file, unless --unsealed.
    """
    if as_csv + as_json + (parquet is not None) > 1:
        raise click.UsageError("give one of --csv, --json and --parquet")
    if parquet is not None and parquet.exists():
        raise FailedError(f"{parquet} is there already: give another name, or remove it first")
    with opened(registry, names, at, query, trust_pickle=trust_pickle, unsealed=unsealed) as database:
        if not unsealed:
            database.seal()
        _run(database.connection, query, as_csv=as_csv, as_json=as_json, parquet=parquet)


@contextmanager
def opened(
    registry: Registry,
    names: Sequence[str],
    at: int | Time | None,
    query: str,
    *,
    trust_pickle: bool = False,
    unsealed: bool = False,
) -> Iterator[Database]:
    """With the tables that ``query`` names, as of ``at``, of ``names``, or of all instances that have a log.

    ``unsealed``: it may be another statement than a query.

    Raises FailedError, click.UsageError, ImmortalError.
    """
    try:
        import duckdb  # noqa: F401

        from immortal.pipeline.sql.database import open_database
    except ImportError as error:
        raise FailedError(f"queries need the extra sql, pip install 'immortal[sql]': {error}") from None
    with ExitStack() as stack:
        logs = _logs(registry, names, at, stack, trust_pickle=trust_pickle)
        database = stack.enter_context(open_database(logs, _decode({log.name: log.settings for log in logs})))
        if not unsealed:
            _refuse_writes(database.connection, query)
        database.prepare(query)
        yield database


def _logs(
    registry: Registry, names: Sequence[str], at: int | Time | None, stack: ExitStack, *, trust_pickle: bool
) -> list[Log]:
    from immortal.coordinator.log.record_decoder import first_record_at
    from immortal.pipeline.sql.database import Log

    found = [registry.load(name) for name in names or registry.names()]
    if names and (missing := [one for one in found if not log_exists(one.log)]):
        raise RegistryError(f"{missing[0].name!r} has not been started yet: there is no log in {missing[0].log}")
    found = [one for one in found if log_exists(one.log)]
    if isinstance(at, int) and len(found) != 1:
        raise click.UsageError(
            f"--at {at}: record numbers are each log's own; give one --instance, or a time, for {len(found)} instances"
        )
    readers = [stack.enter_context(own_logs.open_reader(one, trust_pickle=trust_pickle, check=False)) for one in found]
    lasts = [reader.last_sequence_id() for reader in readers]
    if isinstance(at, int):
        if at > lasts[0]:
            raise click.UsageError(f"--at {at}: the log of {found[0].name} ends with record {lasts[0]}")
        lasts = [at]
    elif at is not None:
        lasts = [first_record_at(reader, at.ns + 1) - 1 for reader in readers]
    return [
        Log(one, reader, functools.partial(_methods, one.app), last)
        for one, reader, last in zip(found, readers, lasts, strict=True)
    ]


@functools.cache
def _methods(app: str | None) -> Methods:
    from immortal.cli.log import methods_of

    return methods_of(app, None) or {}


def _decode(settings: dict[str, InstanceSettings]) -> Decode:
    """By the classes of instances, which are imported with the first row that wants it."""
    decoders: dict[str, ArgumentDecoder | None] = {}

    def decode(instance: str, rpc_kind: str, rpc_type: str, method_id: int, arguments: bytes) -> str | None:
        from immortal.cli.message_formatting import decoder_for
        from immortal.coordinator.log.record_decoder import RPC_KIND_NAMES, RPC_TYPE_NAMES

        if instance not in decoders:
            decoders[instance] = decoder_for(None, settings[instance].app)
        decoder = decoders[instance]
        if decoder is None:
            return None
        kind, of_type = RPC_KIND_NAMES.index(rpc_kind), RPC_TYPE_NAMES.index(rpc_type)
        return decoder.decode(kind, of_type, method_id, arguments).arguments_json

    return decode


def _refuse_writes(connection: DuckDBPyConnection, query: str) -> None:
    """Raises FailedError for a statement that is no query: some make folders as soon as they are looked at."""
    import duckdb

    queries = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN, duckdb.StatementType.CREATE)  # PIVOT creates
    try:
        kinds = [one.type for one in connection.extract_statements(query)]
    except duckdb.Error:
        return  # who prepares the tables says what is wrong
    for kind in kinds:
        if kind not in queries:
            raise FailedError(
                f"one query that only reads was expected, such as select, and this is {kind.name.lower()}: --unsealed"
                " lets it read and write files"
            )


# --- what comes of it -------------------------------------------------------------------------------------------------


def _run(connection: DuckDBPyConnection, query: str, *, as_csv: bool, as_json: bool, parquet: Path | None) -> None:
    import duckdb

    try:
        found = connection.sql(query)
        if found is None:
            raise FailedError("the query gives no rows: one such as select was expected")
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
        raise FailedError(f"{error}\na query reaches the tables alone, and no file: --unsealed lets it") from None
    except duckdb.Error as error:
        raise wrong_query(error) from None


def wrong_query(error: Exception) -> FailedError:
    """What DuckDB says of a query; where it knows no such table, also which there are."""
    import duckdb

    from immortal.pipeline.sql.database import OUR_TABLES

    more = f"\nthere are {', '.join(OUR_TABLES)}; and NAME and NAME.ATTRIBUTE of each instance"
    return FailedError(f"{error}{more if isinstance(error, duckdb.CatalogException) else ''}")


def _write_parquet(found: Any, path: Path) -> int:
    """How many rows were written. The file is there whole or not at all. Raises FailedError."""
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
        echo(f"... and more than these {ROWS_SHOWN_MAX:,}: --json, --csv and --parquet give all", err=True)


def cell(value: Any) -> str:
    """As people read it."""
    if value is None:
        return "-"
    return value.hex(" ") if isinstance(value, bytes) else str(value)


def _print_csv(columns: Sequence[str], rows: Iterator[tuple[Any, ...]]) -> None:
    """As RFC 4180 has it, but that what a terminal would obey is escaped where stdout is one."""
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


# ``python -m immortal.cli.sql``: tables of `immortal sql` as Parquet files, all of one moment.
#
# For other programs; :mod:`pipeline.views` runs it. Its order is JSON on stdin, with ``tables`` by name, and
# ``folder``, which gets a file for each: NAME.parquet. Status 1 with a line on stderr: it could not be done.


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
