"""DuckDB database in memory, with the tables that one query names; nothing else is read or replayed.

messages, records, outputs           from the Parquet files of :mod:`.parquet_cache`; columns of `immortal pipeline`
instances, clients                   from the logs
executions                           from the lists beside the logs
waiting, timers, effects             from all states
NAME, NAME.ATTRIBUTE                 from one state: its attributes, and the items of a container among them
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from msgspec import Struct

from immortal.appsdk.state import tree as state_rows
from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.core.formatting import Methods
from immortal.coordinator.log.reader import LogReader
from immortal.pipeline.sql.parquet_cache import TABLES, Range, update
from immortal.pipeline.sql.states import state_tables, with_instance
from immortal.protocol import redaction
from immortal.protocol.errors import ImmortalError
from immortal.protocol.executions import ExecutionsError, open_index
from immortal.replay.plan import LogViewError

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection


FLEET_STATES = {"waiting": state_rows.WAITING, "timers": state_rows.TIMERS, "effects": state_rows.EFFECTS}
_EMPTY = {
    "waiting": "id bigint, handler text, arguments text, since_ns bigint, caller text, call_number bigint,"
    ' sequence_id bigint, "index" bigint, kind text, waits_for text, step bigint',
    "timers": "id bigint, handler text, kind text, due_ns bigint",
    "effects": "id bigint, handler text, effect text, number bigint, step bigint",
}
_TIMES = {"waiting": "since_ns", "timers": "due_ns"}
LOG_TABLES = (*TABLES, "instances", "clients", "executions")
OUR_TABLES = (*LOG_TABLES, *FLEET_STATES)
_RESERVED = ("main", "temp", "system", "information_schema", "pg_catalog", "memory")

Decode = Callable[[str, str, str, int, bytes], str | None]
"""Function from (instance, rpc_kind, rpc_type, method_id, arguments) to the arguments as JSON."""


class Log(Struct):
    """Log of one instance. ``methods()``: names of its class's methods. ``last``: the last record that is wanted."""

    settings: InstanceSettings
    reader: LogReader
    methods: Callable[[], Methods]
    last: int
    ranges: list[Range] | None = None

    @property
    def name(self) -> str:
        return self.settings.name

    def paths(self, table: str) -> list[str]:
        """Return the paths of a table's Parquet files; none before the files are written."""
        return [str(one.path(table)) for one in self.ranges or ()]


class Database:
    """Database that :func:`open_database` opens. ``cuts``: the cut of each log, after :meth:`prepare`."""

    def __init__(self, connection: DuckDBPyConnection, logs: Sequence[Log], decode: Decode, scratch: Path) -> None:
        self.connection = connection
        self._scratch = scratch
        self._logs = {log.name: log for log in logs}
        self._decode = decode
        self.cuts: dict[str, LogCut] = {}
        self._listed: list[str] | None = None

    def prepare(self, query: str) -> None:
        """Make the tables that ``query`` names. Raises LogViewError, LogError and the errors of a replay."""
        wanted = self._wanted(query)
        self._cut()
        if not self._logs:
            raise LogViewError("no instance that is asked for has a log")
        if _SHOW_TABLES.fullmatch(query):
            self._listed = list(self._all_tables())
            return
        if wanted & {"messages", "records", "outputs", "clients"}:
            self._create_log_views()
        if "messages" in wanted:
            self._create_messages_view()
        if "clients" in wanted:
            self.connection.execute(
                "create view clients as select instance, source as client, count(*) as requests,"
                " max(position) as last_request, max(time_ns) as last_time_ns"
                " from _shown_messages where kind = 'client' group by all"
            )
        if "instances" in wanted:
            rows = [_instance_row(log, self.cuts[log.name]) for log in self._logs.values()]
            self._create_view("instances", pa.Table.from_pylist(rows, schema=_INSTANCES))
        if "executions" in wanted:
            rows = [row for log in self._logs.values() for row in self._executions(log)]
            self._create_view("executions", pa.Table.from_pylist(rows, schema=_EXECUTIONS))
        for_all = wanted & FLEET_STATES.keys()
        states = {
            name: state_tables(log.settings, log.reader, self.cuts[name].last)
            for name, log in self._logs.items()
            if (for_all or name in wanted) and self.cuts[name].last >= 0
        }
        for table in for_all:
            self._create_fleet_table(table, states)
        for name in wanted & states.keys():
            self._create_state_views(name, states[name])

    def run(self, query: str) -> Any:
        """Run the query that was prepared; return DuckDB's relation, None without rows. Raises duckdb.Error."""
        if self._listed is not None:  # DuckDB has only the tables that a query names
            return self.connection.sql("select unnest($1) as name", params=[self._listed])
        return self.connection.sql(query)

    def seal(self, memory_mb: int | None = None) -> None:
        """Restrict all later queries to the prepared tables: they reach no other file.

        ``memory_mb``: the limit of their memory, with nothing spilled to disk; None: DuckDB's defaults.
        """
        paths = [path for log in self._logs.values() for table in TABLES for path in log.paths(table)]
        for setting in (
            f"allowed_paths = {_texts(paths)}",
            *([] if memory_mb is None else ["temp_directory = ''", f"memory_limit = '{memory_mb}MiB'"]),
            "enable_external_access = false",
            "lock_configuration = true",
        ):
            self.connection.execute(f"set {setting}")

    def _wanted(self, query: str) -> set[str]:
        """Return our tables, and the instances whose state ``query`` names."""
        import duckdb

        try:
            named = self.connection.get_table_names(query, qualified=True)
            fronts = {_name_of(found) for name in named if (found := _NAME_IN_QUERY.match(name)) is not None}
        except duckdb.BinderException:  # it names columns of tables that do not exist yet: take every name
            fronts = {_name_of(found) for found in _NAME_IN_QUERY.finditer(query)}
        except duckdb.Error as error:
            raise LogViewError(f"this is no query: {error}") from None
        instances = {name for name in self._logs if {name.lower(), _schema_of(name).lower()} & fronts}
        return instances | {name for name in OUR_TABLES if name in fronts}

    def _all_tables(self) -> Iterator[str]:
        """Yield the names of all tables, as a query writes them."""
        yield from OUR_TABLES
        for name, log in self._logs.items():
            state = f"{_typed(_schema_of(name))}.{state_rows.STATE}"
            yield state if name in OUR_TABLES else _typed(name)
            try:
                tables = (
                    state_tables(log.settings, log.reader, self.cuts[name].last) if self.cuts[name].last >= 0 else {}
                )
            except ImmortalError:
                continue  # a query of it says why
            for table in tables:
                if table != state_rows.STATE and not table.startswith("$"):
                    yield f"{_typed(_schema_of(name))}.{_typed(table)}"

    # --- cuts of the logs --------------------------------------------------------------------------------------------

    def _cut(self) -> None:
        """Cut each log at the end that it had when the database was opened, or at its present end if this is less."""
        for log in self._logs.values():
            first, last = log.reader.ends()
            self.cuts[log.name] = LogCut(log.name, first, min(log.last, last), log.last < last)
        if len(self.cuts) > 1 and any(cut.has_more for cut in self.cuts.values()):
            self._create_log_views()
            make_consistent(self.connection, list(self.cuts.values()))

    def _create_log_views(self) -> None:
        """Create views: ``_logged_TABLE`` with the rows of all files, ``_shown_TABLE`` with those within the cuts."""
        for log in self._logs.values():
            if log.ranges is None:
                # Columns are not encrypted: those of an encrypted log end with the query.
                keeps = not log.reader.identity.is_encrypted
                log.ranges = update(log.reader, log.settings.folder if keeps else self._scratch)
        for table, schema in TABLES.items():
            self.connection.register(f"_no_{table}", schema.empty_table())
            every = [path for log in self._logs.values() for path in log.paths(table)]
            files = f"read_parquet({_texts(every)})" if every else f"_no_{table}"
            self.connection.execute(f"create or replace view _logged_{table} as select * from {files}")
            shown = " union all ".join(self._shown(table, name) for name in self._logs) or f"select * from _no_{table}"
            self.connection.execute(f"create or replace view _shown_{table} as {shown}")
        self.connection.execute("create or replace view records as select * from _shown_records")
        self.connection.execute("create or replace view outputs as select * from _shown_outputs")

    def _shown(self, table: str, name: str) -> str:
        paths, cut = self._logs[name].paths(table), self.cuts[name]
        files = f"read_parquet({_texts(paths)})" if paths else f"_no_{table}"
        return f"select * from {files} where sequence_id between {cut.first} and {cut.last}"

    # --- tables ------------------------------------------------------------------------------------------------------

    def _create_messages_view(self) -> None:
        from duckdb.func import FunctionNullHandling

        rows = [row for log in self._logs.values() for row in _method_rows(log.name, log.methods())]
        self.connection.execute("create table _methods (instance text, key bigint, method text, hidden boolean)")
        if rows:
            columns = {name: [row[index] for row in rows] for index, name in enumerate(_METHODS)}
            self.connection.register("_made_methods", pa.table(columns))
            self.connection.execute("insert into _methods select * from _made_methods")
        self.connection.create_function(  # called for a row only if a query uses its column
            "decode_arguments",
            self._decoded,
            ["varchar", "varchar", "varchar", "integer", "blob"],
            "varchar",
            null_handling=FunctionNullHandling.SPECIAL,
        )
        hidden = "encode(rpad('[redacted]', octet_length(arguments)::integer, '.'))"
        shown = f"if(coalesce(n.hidden, true), {hidden}, arguments)" if redaction.rules() else "arguments"
        # A join for each log, by a number: one for all, by names, takes ten times as long.
        selects = [
            f"""
            select m.instance, sequence_id, "index", time_ns, kind, source, position, sent_ns, rpc_kind, rpc_type,
                   method_id, n.method, {shown} as arguments,
                   decode_arguments(m.instance, rpc_kind, rpc_type, method_id, m.arguments) as arguments_json,
                   ok, reason
            from ({self._shown("messages", name)}) m
            left join (select key, method, hidden from _methods where instance = {_text(name)}) n
              on n.key = if(kind <> 'initial', method_id::bigint * 2 + (rpc_kind = 'call')::integer, null)
            """
            for name in self._logs
        ]
        self.connection.execute(f"create view messages as {' union all '.join(selects)}")

    def _decoded(
        self, instance: str, rpc_kind: str | None, rpc_type: str | None, method_id: int | None, arguments: bytes | None
    ) -> str | None:
        if rpc_kind is None or rpc_type is None or method_id is None or arguments is None:
            return None
        return self._decode(instance, rpc_kind, rpc_type, method_id, arguments)

    def _executions(self, log: Log) -> Iterator[dict[str, Any]]:
        """Yield the executions of an instance as they were at its cut, if it has a list of them."""
        cut = self.cuts[log.name]
        end_ns = _time_of(log, cut)
        try:
            with open_index(log.settings.folder, log.name) as index:
                for row in index.all_rows():
                    if row["sequence_id"] <= cut.last:
                        has_more = cut.has_more and end_ns is not None and (row["ended_ns"] or 0) > end_ns
                        then = {"state": "waiting", "ended_ns": None, "result": None} if has_more else {}
                        yield row | {"instance": log.name} | then
        except ExecutionsError:
            return

    def _create_view(self, name: str, rows: pa.Table) -> None:
        self.connection.register(f"_made_{name}", rows)
        self.connection.execute(f"create view {name} as select * from _made_{name}")

    def _create_fleet_table(self, table: str, states: Mapping[str, Mapping[str, pa.Table]]) -> None:
        self.connection.execute(f"create table {table} (instance text, {_EMPTY[table]})")
        for made in with_instance(states, FLEET_STATES[table]):
            self.connection.register("_made_rows", made)
            self.connection.execute(f"insert into {table} by name select * from _made_rows")
        if (column := _TIMES.get(table)) is not None:
            name = column.removesuffix("_ns")
            self.connection.execute(f"alter table {table} add column {name} timestamp")
            self.connection.execute(f"update {table} set {name} = make_timestamp({column} // 1000)")

    def _create_state_views(self, name: str, tables: Mapping[str, pa.Table]) -> None:
        schema = _schema_of(name)
        self.connection.execute(f"create schema if not exists {_quoted(schema)}")
        for table, rows in tables.items():
            if not table.startswith("$"):
                made = f"made {name} {table}"
                self.connection.register(made, rows)
                place = f"{_quoted(schema)}.{_quoted(table)}"
                self.connection.execute(f"create view {place} as select * from {_quoted(made)}")
        if name not in OUR_TABLES:
            place = f"{_quoted(schema)}.{state_rows.STATE}"
            self.connection.execute(f"create view main.{_quoted(name)} as select * from {place}")


_EXECUTIONS = pa.schema(
    [
        ("instance", pa.string()),
        ("id", pa.string()),
        ("handler", pa.string()),
        ("arguments", pa.string()),
        ("state", pa.string()),
        ("began_ns", pa.int64()),
        ("ended_ns", pa.int64()),
        ("caller", pa.string()),
        ("call_number", pa.int64()),
        ("sequence_id", pa.int64()),
        ("index", pa.int64()),
        ("result", pa.string()),
        ("origin", pa.string()),
        ("labels", pa.string()),  # a JSON object: labels->>'order'
    ]
)
_INSTANCES = pa.schema(
    [
        ("instance", pa.string()),
        ("app", pa.string()),
        ("version", pa.int64()),
        ("committer_id", pa.int64()),
        ("epoch", pa.int64()),  # the log's, now
        ("first_sequence_id", pa.int64()),
        ("last_sequence_id", pa.int64()),
        ("last_time_ns", pa.int64()),
        ("checkpoint_id", pa.int64()),  # the newest up to the last shown record
        ("checkpoint_sequence_id", pa.int64()),
    ]
)


def _time_of(log: Log, cut: LogCut) -> int | None:
    """Return the time of the last shown record, in ns since the Unix epoch; None if it is unknown."""
    from immortal.coordinator.log.record_contents import read_record

    for logged in log.reader.records(cut.last, cut.last) if cut.last >= cut.first else ():
        committer_id = log.reader.summary().committer_id
        record = logged.problem or read_record(logged.value, logged.sequence_id, committer_id, whole=False)
        return None if isinstance(record, str) else record.trailer.time_ns
    return None


def _instance_row(log: Log, cut: LogCut) -> dict[str, Any]:
    summary = log.reader.summary()
    versions = [start.version for start in summary.versions if start.sequence_id < cut.last]
    checkpoints = [header for header in summary.checkpoints if header.sequence_id <= cut.last]
    return {
        "instance": log.name,
        "app": log.settings.app,
        "version": versions[-1] if versions else None,
        "committer_id": summary.committer_id,
        "epoch": summary.epoch,
        "first_sequence_id": cut.first,
        "last_sequence_id": cut.last,
        "last_time_ns": _time_of(log, cut),
        "checkpoint_id": checkpoints[-1].checkpoint_id if checkpoints else None,
        "checkpoint_sequence_id": checkpoints[-1].sequence_id if checkpoints else None,
    }


_METHODS = ("instance", "key", "method", "hidden")


def _method_rows(instance: str, methods: Methods) -> Iterator[tuple[str, int, str, bool]]:
    """Yield (instance, key, method, True if its arguments are hidden).

    Key: 2 * method ID for answers, plus 1 for calls to the instance's own methods.
    """
    answers: dict[int, str] = {}
    for (destination, method_id), name in methods.items():
        short = name.rpartition(".")[2]
        if destination:
            answers[method_id] = short
        else:
            yield instance, method_id * 2 + 1, short, redaction.may_apply(short if method_id >= 0 else None)
    for method_id, short in answers.items():
        yield instance, method_id * 2, short, redaction.may_apply(short)


@contextmanager
def open_database(logs: Sequence[Log], decode: Decode) -> Iterator[Database]:
    """Open a database on ``logs``, whose ends were all read before any log is read again."""
    import duckdb

    connection = duckdb.connect(
        config={"autoinstall_known_extensions": False, "autoload_known_extensions": False}
    )  # it asks no other host
    try:
        with tempfile.TemporaryDirectory(prefix="immortal-columns-") as scratch:
            yield Database(connection, logs, decode, Path(scratch))
    finally:
        connection.close()


_SHOW_TABLES = re.compile(r"\s*show\s+(all\s+)?tables\s*;?\s*", re.IGNORECASE)
_NAME_IN_QUERY = re.compile(r'"((?:[^"]|"")*)"|(\w+)')  # the first of ``counter.words AS w``, ``"service-0".words``


def _name_of(found: re.Match[str]) -> str:
    """Return the found name in lower case, as SQL compares names."""
    return (found[2] or found[1].replace('""', '"')).lower()


def _schema_of(instance: str) -> str:
    return f"{instance}_" if instance.lower() in _RESERVED else instance


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _typed(name: str) -> str:
    return name if re.fullmatch(r"[a-z_]\w*", name) else _quoted(name)


def _text(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _texts(texts: Sequence[str]) -> str:
    return f"[{', '.join(map(_text, texts))}]"


# Cuts of the logs of a fleet, so that no effect is shown without its cause.
#
# If B has logged a call, A made it before. A's mark in its record r + 1 says how many calls to B the records up to r
# had made by then, at least. So if A is cut after r, B is cut before the first call from A with a higher position. It
# is repeated until nothing changes, since a shorter log of B can lack the causes of others' calls.
#
# A mark can be late: A's records have none while a checkpoint must be taken first. So calls that B logged before the
# time of A's record r + 1, by their clocks, count as made by then as well.
#
# A log whose end was the same before and after all other ends were read needs no mark: the calls that others have from
# it were durable in it by then, since nothing leaves an instance before its cause is durable.


class LogCut(Struct):
    """Cut of one log. ``last``: last shown record. ``has_more``: True if the log has records after ``last``."""

    instance: str
    first: int
    last: int
    has_more: bool


def make_consistent(database: DuckDBPyConnection, cuts: list[LogCut]) -> None:
    """Move ``cuts`` back until no log shows a call whose cause is after the cut of its sender's log.
    ``database`` has the uncut tables "_logged_messages" and "_logged_outputs"."""
    by_name = {cut.instance: cut for cut in cuts}
    while found := _too_late(database, cuts):
        for instance, first_without_cause in found:
            by_name[instance].last = first_without_cause - 1
            by_name[instance].has_more = True


def _too_late(database: DuckDBPyConnection, cuts: list[LogCut]) -> list[tuple[str, int]]:
    """Return (instance, its first record with a call whose cause is after its sender's cut)."""
    database.execute("create or replace temp table _cuts (instance text, first bigint, last bigint, has_more boolean)")
    database.executemany(
        "insert into _cuts values (?, ?, ?, ?)", [[cut.instance, cut.first, cut.last, cut.has_more] for cut in cuts]
    )
    # Without a mark in the kept part of a log, all was made before it; without one in a whole log, nothing was.
    found: list[tuple[str, int]] = database.execute(
        """
        with made as (
            select o.instance as sender, o.destination as receiver, max(o.position) as position
            from _logged_outputs o join _cuts c on c.instance = o.instance
            where o.sequence_id <= c.last + 1
            group by all
        ), next as (
            select m.instance as sender, m.time_ns
            from _logged_messages m join _cuts c on c.instance = m.instance and m.sequence_id = c.last + 1
            where m."index" = 0
        )
        select m.instance, min(m.sequence_id)
        from _logged_messages m
        join _cuts r on r.instance = m.instance and m.sequence_id <= r.last
        join _cuts s on s.instance = m.source and s.has_more
        left join made on made.sender = m.source and made.receiver = m.instance
        left join next on next.sender = m.source
        where m.kind = 'stream' and m.source <> m.instance and coalesce(m.time_ns >= next.time_ns, true)
          and m.position > coalesce(made.position, if(s.first = 0, 0, 9223372036854775807))
        group by m.instance
        """
    ).fetchall()
    return found
