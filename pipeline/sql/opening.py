"""Opens the logs of a home as tables for SQL, as of one moment; `python -m` writes tables as Parquet files."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.instances import own_logs
from immortal.coordinator.instances.registry import Registry, RegistryError
from immortal.coordinator.log.identity import MomentError, Time, parse_moment
from immortal.coordinator.log.open import log_exists
from immortal.protocol import decoding, distribution, shared_registry
from immortal.protocol.errors import ImmortalError
from immortal.replay.plan import LogViewError

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

    from immortal.coordinator.core.formatting import Methods
    from immortal.pipeline.arguments import ArgumentDecoder
    from immortal.pipeline.sql.database import Database, Decode, Log


@contextmanager
def open_sql(
    registry: Registry,
    names: Sequence[str],
    at: int | Time | None,
    query: str,
    *,
    trust_pickle: bool = False,
    unsealed: bool = False,
) -> Iterator[Database]:
    """Open a database with the tables that ``query`` names, as of ``at``. ``names`` (): all instances with a log.

    ``unsealed``: any statement is allowed, not only a query. Raises MomentError if there is no record ``at``, and other
    ImmortalErrors.
    """
    try:
        import duckdb  # noqa: F401

        from immortal.pipeline.sql.database import open_database
    except ImportError as error:
        raise LogViewError(f"queries need the extra sql ({error}): {distribution.add_extra('sql')}") from None
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
    from immortal.coordinator.log.record_contents import first_record_at
    from immortal.pipeline.sql.database import Log

    found = [registry.load(name) for name in names or registry.names()]
    if names and (missing := [one for one in found if not log_exists(one.log)]):
        raise RegistryError(f"{missing[0].name!r} has not been started yet: there is no log in {missing[0].log}")
    found = [one for one in found if log_exists(one.log)]
    if isinstance(at, int) and len(found) != 1:
        raise MomentError(
            f"{at}: record numbers are each log's own; give one --instance, or a time, for {len(found)} instances"
        )
    readers = [stack.enter_context(own_logs.open_reader(one, trust_pickle=trust_pickle, check=False)) for one in found]
    lasts = [reader.last_sequence_id() for reader in readers]
    if isinstance(at, int):
        if at > lasts[0]:
            raise MomentError(f"{at}: the log of {found[0].name} ends with record {lasts[0]}")
        lasts = [at]
    elif at is not None:
        lasts = [first_record_at(reader, at.ns + 1) - 1 for reader in readers]
    return [
        Log(one, reader, functools.partial(_methods, one.app), last)
        for one, reader, last in zip(found, readers, lasts, strict=True)
    ]


@functools.cache
def _methods(app: str | None) -> Methods:
    from immortal.replay.app_process import methods_of

    return methods_of(app, None) or {}


def _decode(settings: dict[str, InstanceSettings]) -> Decode:
    """Return a decoder of arguments by the instances' classes; a class is imported at the first row that needs it."""
    decoders: dict[str, ArgumentDecoder | None] = {}

    def decode(instance: str, rpc_kind: str, rpc_type: str, method_id: int, arguments: bytes) -> str | None:
        from immortal.coordinator.log.record_contents import RPC_KIND_NAMES, RPC_TYPE_NAMES
        from immortal.pipeline.arguments import decoder_for

        if instance not in decoders:
            decoders[instance] = decoder_for(None, settings[instance].app)
        decoder = decoders[instance]
        if decoder is None:
            return None
        kind, of_type = RPC_KIND_NAMES.index(rpc_kind), RPC_TYPE_NAMES.index(rpc_type)
        return decoder.decode(kind, of_type, method_id, arguments).arguments_json

    return decode


def _refuse_writes(connection: DuckDBPyConnection, query: str) -> None:
    """Refuse statements that are no query: DuckDB creates folders for some before it runs them. Raises LogViewError."""
    import duckdb

    queries = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN, duckdb.StatementType.CREATE)  # PIVOT creates
    try:
        kinds = [one.type for one in connection.extract_statements(query)]
    except duckdb.Error:
        return  # the preparation of the tables reports the error
    for kind in kinds:
        if kind not in queries:
            raise LogViewError(
                f"one query that only reads was expected, such as select, and this is {kind.name.lower()}: --unsealed"
                " lets it read and write files"
            )


def wrong_query(error: Exception) -> LogViewError:
    """Return DuckDB's error as a LogViewError; for an unknown table, with the list of tables."""
    import duckdb

    from immortal.pipeline.sql.database import OUR_TABLES

    more = f"\nthere are {', '.join(OUR_TABLES)}; and NAME and NAME.ATTRIBUTE of each instance: 'show tables'"
    return LogViewError(f"{error}{more if isinstance(error, duckdb.CatalogException) else ''}")


class Order(msgspec.Struct, frozen=True):
    """Order to write tables. ``at`` "": now. ``names`` (): all instances with a log. ``tables``: as in a query."""

    home: str
    folder: str
    tables: tuple[str, ...]
    at: str = ""
    names: tuple[str, ...] = ()


def write_tables(order: Order) -> None:
    """Write each table to a Parquet file in the folder, named as the table. Raises ImmortalError, OSError."""
    at: int | Time | None = parse_moment(order.at) if order.at else None
    quoted = {table: _quoted(table) for table in order.tables}
    with open_sql(Registry(order.home), order.names, at, f"from {', '.join(quoted.values())}") as database:
        import duckdb

        for table, name in quoted.items():
            try:
                found = database.connection.sql(f"from {name}")
                found.write_parquet(str(Path(order.folder, f"{table}.parquet")), compression="zstd")
            except duckdb.Error as error:
                raise wrong_query(error) from None


def _quoted(table: str) -> str:
    return ".".join('"' + part.replace('"', '""') + '"' for part in table.split("."))


def main() -> None:
    try:
        order = decoding.decode_json(sys.stdin.buffer.read(), type=Order)
        shared_registry.chosen_home = order.home  # its rules of redaction apply
        write_tables(order)
    except (ImmortalError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
