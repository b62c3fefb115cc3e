"""List of an instance's executions: a SQLite file beside its log, derived from the log.

The app writes the list after its handlers run (:mod:`immortal.appsdk.running.executions`); tools read it. No replay
depends on it: if it is lost, `immortal executions NAME rebuild` creates it again from the log.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from immortal.protocol import redaction
from immortal.protocol.errors import ImmortalError
from immortal.protocol.files import FILE_MODE

if TYPE_CHECKING:
    import sqlite3  # which no coordinator needs

FILE_NAME = "executions.db"
STATES = ("waiting", "ended", "failed", "cancelled", "terminated")
INDEX_BITS = 22  # of the key of a 'def' handler's call: the index of the message in its record
TIMEOUT_S = 10.0
PROGRESS_STEPS = 100_000  # steps of SQLite between two checks of the time: some ms

_SCHEMA = """
pragma journal_mode = wal;
pragma synchronous = normal;
create table if not exists executions (
    key integer primary key, handler text not null, method_id integer not null, state text not null,
    began_ns integer not null, ended_ns integer, caller text, call_number integer not null,
    record integer not null, message integer not null, arguments text not null, data blob, result text,
    journal blob, origin integer, stale integer not null default 0, ended_record integer, ended_message integer
);
create index if not exists by_time on executions (began_ns);
create index if not exists by_handler on executions (handler, began_ns);
create index if not exists by_state on executions (state, began_ns) where state <> 'ended';
create index if not exists by_end on executions (ended_ns) where ended_ns is not null;
create index if not exists by_call on executions (call_number) where call_number > 0;
create index if not exists by_origin on executions (origin) where origin is not null;
create index if not exists by_failure on executions (ended_record) where state = 'failed';
create index if not exists by_stale on executions (stale) where stale <> 0;
create table if not exists labels (key integer, name text, value text, primary key (key, name)) without rowid;
create index if not exists by_label on labels (name, value, key);
create table if not exists parts (
    key integer, step integer, number integer, destination text, attempts integer, primary key (key, step)
) without rowid;
create index if not exists by_number on parts (number) where number > 0;
"""
_COLUMNS = (
    "key, handler, method_id, state, began_ns, ended_ns, caller, call_number, record, message, arguments, result,"
    " origin, ended_record, ended_message"
)


class ExecutionsError(ImmortalError):
    """Raised if the list of executions can't be read, or lacks the requested entry."""


class UnknownNameError(ExecutionsError):
    """Raised if a list has no such handler or label. ``what``: the text before the known names."""

    def __init__(self, what: str, known: Iterable[str]) -> None:
        self.what, self.known = what, set(known)
        super().__init__(f"{what}: there are {', '.join(sorted(self.known)) or 'none'}")


class Execution(Struct):
    """Run of one handler. ``key``: its number, below 0 for a call of a ``def`` handler.

    ``caller``: who waits for its answer, in the form of `immortal handlers`. ``record``, ``message``: the message that
    began it; ``ended_record``, ``ended_message``: the message that ended it, if known.
    ``arguments`` and ``result`` are text. ``origin``: the key of the execution that it repeats.
    """

    key: int
    handler: str
    method_id: int
    state: str
    began_ns: int
    ended_ns: int | None
    caller: str | None
    call_number: int
    record: int
    message: int
    arguments: str
    result: str | None
    origin: int | None
    ended_record: int | None
    ended_message: int | None
    labels: dict[str, str] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """ID for people: the number of an async handler, or RECORD:MESSAGE of a call."""
        return id_of(self.key)

    @property
    def call(self) -> str:
        """The handler's name and arguments, as in code."""
        return f"{self.handler}{self.arguments}"

    def plain(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        values = {name: getattr(self, name) for name in self.__struct_fields__ if name not in ("key", "method_id")}
        return {"id": self.id, **values, "origin": None if self.origin is None else id_of(self.origin)}


class Query(Struct, kw_only=True):
    """Search for executions: the newest first, at most ``limit``. ``before``: the (began_ns, key) to continue after.

    ``where``: labels with their values, all of which must match. ``handler``: with or without its class. ``text``: a
    part of the arguments. Times are ns since the Unix epoch.
    """

    where: Sequence[tuple[str, str]] = ()
    handler: str = ""
    state: str = ""
    caller: str | None = None
    since_ns: int | None = None
    until_ns: int | None = None
    text: str = ""
    before: tuple[int, int] | None = None
    limit: int = 100


def _redacted(one: Execution) -> Execution:
    """Hide texts that were written before there was a rule, or without parameters' names."""
    if redaction.may_apply(one.handler):
        one.arguments, one.result = f"({redaction.REDACTED})", one.result and redaction.REDACTED
    return one


def key_of_call(record: int, message: int) -> int:
    """Return the key of a ``def`` handler's call; later calls have lower keys."""
    return -((record << INDEX_BITS) | message) - 1


def id_of(key: int) -> str:
    """Return the ID of an execution, as people see it."""
    if key > 0:
        return str(key)
    record, message = _place(key)
    return f"{record}:{message}"


def _place(key: int) -> tuple[int, int]:
    place = -key - 1
    return place >> INDEX_BITS, place & ((1 << INDEX_BITS) - 1)


def key_of_id(text: str) -> int:
    """Return the key of an ID. Raises ExecutionsError."""
    record, colon, message = text.partition(":")
    parts = (record, message) if colon else (record,)
    if not all(part.isascii() and part.isdecimal() and len(part) < 14 for part in parts):
        raise ExecutionsError(f"{text[:40]!r}: the ID of an execution was expected, such as 17, or 312:0 of a call")
    return key_of_call(int(record), int(message)) if colon else int(record)


def label_of(text: str) -> tuple[str, str]:
    """Parse a label such as "order=17". Raises ExecutionsError."""
    name, equals, value = text.partition("=")
    if not (equals and name.isidentifier()):
        raise ExecutionsError(f"{text[:60]!r}: a label and its value were expected, such as order=17")
    return name, value


class ExecutionIndex:
    """Reader of the list of an instance's executions, for one thread."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database

    def find(self, query: Query) -> list[Execution]:
        """Find the executions that ``query`` asks for. Raises ExecutionsError."""
        found = list(self._with_labels(self._rows(*self._select(query))))
        if query.where and not found:
            known = self._distinct("name", "labels")
            for name in {name for name, _ in query.where}.difference(known):
                raise UnknownNameError(f"no execution has a label {name!r}", known)
        return found

    def get(self, key: int) -> Execution | None:
        """Return the execution with this key, or the one that the message of ``key`` made fail."""
        found = self._rows("from executions e where e.key = ?", [key])
        if not found and key < 0:
            failed = "from executions e where e.state = 'failed' and (e.ended_record, e.ended_message) = (?, ?)"
            found = self._rows(failed, _place(key))
        return next(iter(self._with_labels(found)), None)

    def journal(self, key: int) -> bytes | None:
        """Return an ended execution's encoded journal; None if it waits, had no steps, or the steps are too large."""
        return self._value("select journal from executions where key = ?", key)  # type: ignore[no-any-return]

    def attempts(self, key: int) -> dict[int, int]:
        """Return the number of attempts of an execution's effects, by step, for effects tried more than once."""
        rows = self._run("select step, attempts from parts where key = ? and attempts > 1", [key])
        return {int(step): int(count) for step, count in rows}

    def data(self, key: int) -> bytes | None:
        """Return an execution's encoded arguments; None if they are too large to be kept here."""
        return self._value("select data from executions where key = ?", key)  # type: ignore[no-any-return]

    def calls(self, key: int) -> list[tuple[int, int, str]]:
        """Return the calls that an execution has waited for: (step, number of the call, receiver; "" is itself)."""
        sql = "select step, number, destination from parts where key = ? and number > 0 order by step"
        return [(int(step), int(number), str(to)) for step, number, to in self._run(sql, [key])]

    def called_by(self, caller: str, number: int) -> list[Execution]:
        """Return the executions here that call ``number`` of ``caller`` began."""
        return self._rows("from executions e where e.call_number = ? and e.caller = ?", [number, caller])

    def caller_of(self, number: int) -> int | None:
        """Return the key of the execution that made the call ``number``."""
        return self._value("select key from parts where number = ?", number)  # type: ignore[no-any-return]

    def started_by(self, record: int, time_ns: int) -> dict[int, int]:
        """Return the keys of the executions that the record with this time began, by message index."""
        sql = "select message, key from executions where began_ns = ? and record = ?"
        return {int(message): int(key) for message, key in self._run(sql, [time_ns, record])}

    def repeats_of(self, key: int) -> list[Execution]:
        return self._rows("from executions e where e.origin = ?", [key])

    def all_rows(self) -> Iterator[dict[str, Any]]:
        """Yield all executions as SQL shows them, with labels as JSON."""
        labels = "select json_group_object(name, value) from labels l where l.key = e.key"
        columns = "e.arguments, e.state, e.began_ns, e.ended_ns, e.caller, e.call_number, e.result"
        cursor = self._run(
            f'select e.key, e.origin, e.handler, e.record as sequence_id, e.message as "index", {columns},'  # noqa: S608
            f" ({labels}) as labels from executions e",
            [],
        )
        names = [one[0] for one in cursor.description]
        for key, origin, *row in cursor:
            values = dict(zip(names[2:], row, strict=True))
            if redaction.may_apply(values["handler"]):
                values |= dict.fromkeys(("arguments", "result", "labels"), redaction.REDACTED)
            yield {"id": id_of(key), "origin": origin and id_of(origin), **values}

    def _select(self, query: Query) -> tuple[str, list[Any]]:
        tables, conditions, values = "executions e", ["true"], list[Any]()
        for number, (name, value) in enumerate(query.where):
            if number:
                conditions.append("exists (select 1 from labels o where (o.name, o.value, o.key) = (?, ?, e.key))")
            else:  # SQLite must begin with the label, whatever it estimates for the other conditions
                tables = "labels l cross join executions e on e.key = l.key"
                conditions.append("l.name = ? and l.value = ?")
            values += [name, value]
        if query.handler:
            names = [one for one in self._handlers() if one == query.handler or one.endswith(f".{query.handler}")]
            if not names:
                raise UnknownNameError(f"no execution of a handler {query.handler!r} is known", self._handlers())
            conditions.append(f"e.handler in ({', '.join('?' * len(names))})")
            values += names
        more: tuple[tuple[str, str | int | None], ...] = (
            ("e.state = ?", query.state or None),
            ("e.caller = ?", query.caller),
            ("e.began_ns >= ?", query.since_ns),
            ("e.began_ns <= ?", query.until_ns),
            ("instr(e.arguments, ?)", query.text or None),
        )
        given = [one for one in more if one[1] is not None]
        conditions += [condition for condition, _ in given]
        values += [value for _, value in given]
        if query.state and query.state != "ended":
            conditions.append("e.state <> 'ended'")  # so that SQLite takes the small index
        if query.before is not None:
            conditions.append("(e.began_ns, e.key) < (?, ?)")
            values += query.before
        order = "order by e.began_ns desc, e.key desc limit ?"
        return f"from {tables} where {' and '.join(conditions)} {order}", [*values, query.limit]

    def _handlers(self) -> list[str]:
        return self._distinct("handler", "executions")

    def _distinct(self, column: str, table: str) -> list[str]:
        """Return all values of a column, by one index lookup for each value."""
        sql = f"""
            with recursive every(one) as (
                select min({column}) from {table}
                union all select (select min({column}) from {table} where {column} > one) from every
                where one is not null
            ) select one from every where one is not null
        """  # noqa: S608
        return [str(one) for (one,) in self._run(sql, [])]

    def _rows(self, rest: str, values: Sequence[Any]) -> list[Execution]:
        columns = ", ".join(f"e.{name.strip()}" for name in _COLUMNS.split(","))
        return [_redacted(Execution(*row)) for row in self._run(f"select {columns} {rest}", values)]

    def _with_labels(self, found: Iterable[Execution]) -> Iterator[Execution]:
        for one in found:
            labels = self._run("select name, value from labels where key = ? order by name", [one.key])
            one.labels = redaction.redact(dict(labels), (one.handler.rpartition(".")[2],))
            yield one

    def _value(self, sql: str, value: object) -> Any:
        row = self._run(sql, [value]).fetchone()
        return None if row is None else row[0]

    def _run(self, sql: str, values: Sequence[Any]) -> sqlite3.Cursor:
        from sqlite3 import Error

        try:
            return self._database.execute(sql, values)
        except Error as error:
            hint = ": it takes too long; narrow it down, such as by a label" if str(error) == "interrupted" else ""
            raise ExecutionsError(f"the list of executions can't be read: {error}{hint}") from None


@contextmanager
def open_index(folder: Path, name: str, within_s: float | None = None) -> Iterator[ExecutionIndex]:
    """Open the list of the instance ``name``, whose folder is ``folder``. Raises ExecutionsError.

    ``within_s``: limit for all queries together, after which they fail; None: no limit.
    """
    import sqlite3

    path = folder / FILE_NAME
    if not path.exists():
        raise ExecutionsError(
            f"no execution of {name!r} is listed: it has not run yet, has no 'async def' handler and no labels, has"
            " keep_executions_days = 0 or an encryption_key, or its app runs elsewhere;"
            f" 'immortal executions {name} rebuild' makes the list from its log"
        )
    try:
        database = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=TIMEOUT_S)
    except sqlite3.Error as error:
        raise ExecutionsError(f"{path} can't be opened: {error}") from None
    with closing(database):
        if within_s is not None:
            end_s = time.monotonic() + within_s
            database.set_progress_handler(lambda: time.monotonic() > end_s, PROGRESS_STEPS)
        yield ExecutionIndex(database)


def find_in(folders: Mapping[str, Path], query: Query, *, is_named: bool = True) -> list[tuple[str, Execution]]:
    """Find executions in the lists of instances: the newest first, ``query.limit`` in all. Raises ExecutionsError.

    ``is_named``: the user named the instances, so each must have a list.
    """
    found: list[tuple[str, Execution]] = []
    unknown: list[UnknownNameError] = []
    count = 0
    for name, folder in folders.items():
        if is_named or (folder / FILE_NAME).exists():
            count += 1
            with open_index(folder, name) as index:
                try:
                    found += [(name, one) for one in index.find(query)]
                except UnknownNameError as error:
                    unknown.append(error)
    if unknown and len(unknown) == count:
        raise UnknownNameError(unknown[0].what, set().union(*(one.known for one in unknown)))
    found.sort(key=lambda one: (-one[1].began_ns, one[0], -one[1].key))
    return found[: query.limit]


def open_to_write(path: Path) -> sqlite3.Connection:
    """Open a list for writing; create it if it is missing. Raises sqlite3.Error, OSError."""
    import sqlite3

    if not path.exists():  # readers see the file with all its tables, or no file
        made = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            os.close(os.open(made, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, FILE_MODE))  # it has arguments, like the log
            with closing(sqlite3.connect(made)) as database:
                database.executescript(_SCHEMA)
            with suppress(FileExistsError):  # another process was faster
                os.link(made, path)
        finally:
            made.unlink(missing_ok=True)
    database = sqlite3.connect(path, timeout=TIMEOUT_S, check_same_thread=False)
    database.executescript(_SCHEMA)
    return database


def merge(folder: Path, rebuilt: Path) -> int:
    """Add the executions that only the list ``rebuilt`` has to the list in ``folder``; return their number.
    Raises ExecutionsError."""
    import sqlite3

    try:
        with closing(open_to_write(folder / FILE_NAME)) as database:
            database.execute("attach ? as other", [str(rebuilt)])
            added, last = 0, -(1 << 63)
            batch = "select key from other.executions where key > ? order by key limit 5000"
            while keys := [key for (key,) in database.execute(batch, [last])]:
                last = keys[-1]
                with database:  # a short transaction: the app writes too
                    there = f"select key from main.executions where key between {keys[0]} and {last}"  # noqa: S608
                    new = f"where key between {keys[0]} and {last} and key not in ({there})"
                    for table in ("labels", "parts", "executions"):
                        made = database.execute(f"insert or ignore into main.{table} select * from other.{table} {new}")  # noqa: S608
                    added += made.rowcount
            return added
    except (sqlite3.Error, OSError) as error:
        raise ExecutionsError(f"the list of executions can't be written: {error}") from None


def described_labels(labels: Mapping[str, str]) -> str:
    """Format labels as "order=17 item=tea"."""
    return " ".join(f"{name}={value}" for name, value in labels.items())
