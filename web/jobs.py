"""Jobs of the page: what-ifs and SQL queries, each in a process, a few at a time. A what-if keeps its address."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from immortal.coordinator.config import write_atomically
from immortal.coordinator.core.output.output_check import OutputDivergenceError
from immortal.coordinator.instances import own_logs
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.log.identity import Time, parse_moment
from immortal.pipeline.sql.opening import open_sql, wrong_query
from immortal.presenters.records import cell
from immortal.presenters.what_if import Report
from immortal.protocol import decoding
from immortal.protocol.errors import ImmortalError
from immortal.protocol.files import make_folder
from immortal.replay import OWN_VERSION, AppCommand
from immortal.replay.app_process import OwnCode, own_code_at_end
from immortal.replay.comparison import Side
from immortal.replay.what_if import plan_what_if, run_what_if, try_upgrade
from immortal.web import WebError

WHAT_IFS_MAX = 2  # at once; each runs two apps
KEPT_MAX = 200
LIST_MAX = 20
QUERIES_MAX = 2  # at once; each may replay several services
ANSWER_S = 120.0  # the first query of a large log writes its columns
SAID_CHARACTERS_MAX = 2000  # of the last words of a process that gave no answer
_ID = re.compile(r"[0-9a-f]{12}")


class Job(msgspec.Struct):
    """Job of a what-if. ``state``: running, done, failed, cancelled. ``report``: as of `immortal what-if --json`."""

    id: str
    order: Order
    state: str
    started_ns: int
    done: int = 0
    total: int | None = None
    error: str = ""
    report: dict[str, Any] | None = None


class Jobs:
    """Running what-ifs, and earlier ones, each in a file of ``folder``. For all threads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._running: dict[str, tuple[Job, subprocess.Popen[bytes]]] = {}

    def start(self, order: Order) -> Job:
        """Start a what-if. Raises WebError if too many run already."""
        job = Job(secrets.token_hex(6), order, "running", time.time_ns())
        with self._lock:
            if len(self._running) >= WHAT_IFS_MAX:
                raise WebError(f"{WHAT_IFS_MAX} what-ifs run already: wait for one of them, or cancel it", 409)
            process = _start("what-if", subprocess.DEVNULL)
            self._running[job.id] = job, process
        self._keep(job)
        threading.Thread(target=self._follow, args=(job, process), name=f"what-if {job.id}", daemon=True).start()
        return job

    def job(self, job_id: str) -> Job:
        """Return the what-if of an ID. Raises WebError if there is none."""
        with self._lock:
            if job_id in self._running:
                return self._running[job_id][0]
        if not _ID.fullmatch(job_id):
            raise WebError(f"there is no what-if {job_id[:40]!r}", 404)
        try:
            job = decoding.decode_json(self._path(job_id).read_bytes(), type=Job)
        except FileNotFoundError:
            raise WebError(f"there is no what-if {job_id}", 404) from None
        except (decoding.DecodeError, OSError) as error:
            raise WebError(f"the what-if {job_id} can't be read: {error}", 500) from None
        if job.state == "running":  # of an earlier life of this server
            job.state, job.error = "failed", "the server was stopped while it ran: start it again"
        return job

    def of(self, name: str) -> list[Job]:
        """Return the last what-ifs of an instance, the newest first."""
        found = []
        for path in self._paths():
            try:
                job = self.job(path.stem)
            except WebError:
                continue  # removed just now, or damaged
            if job.order.name == name:
                found.append(job)
                if len(found) == LIST_MAX:
                    break
        return found

    def cancel(self, job_id: str) -> None:
        with self._lock:
            running = self._running.get(job_id)
        if running is not None:
            running[0].state = "cancelled"
            _end(running[1])

    def close(self) -> None:
        with self._lock:
            running = list(self._running.values())
        for _, process in running:
            _end(process)

    def _follow(self, job: Job, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with process.stdin as stdin:
                stdin.write(msgspec.json.encode(job.order))
            for line in process.stdout:
                said = decoding.decode_json(line)
                if "progress" in said:
                    job.done, job.total = said["progress"]
                else:
                    job.report, job.error = said.get("report"), said.get("error", "")
        except (ValueError, OSError) as error:
            job.error = f"{type(error).__name__}: {error}"
        finally:
            _end(process)
            process.wait()
            process.stdout.close()
        if job.state == "running":
            job.state = "failed" if job.report is None else "done"
            job.error = job.error or ("" if job.report else f"its process ended with status {process.returncode}")
        self._keep(job)
        with self._lock:
            del self._running[job.id]

    def _keep(self, job: Job) -> None:
        make_folder(self._folder)
        write_atomically(self._path(job.id), msgspec.json.encode(job), mode=0o600)
        for path in self._paths()[KEPT_MAX:]:
            path.unlink(missing_ok=True)

    def _paths(self) -> list[Path]:
        def age(path: Path) -> float:
            try:
                return -path.stat().st_mtime
            except OSError:
                return 0

        return sorted(self._folder.glob("*.json"), key=age)

    def _path(self, job_id: str) -> Path:
        return self._folder / f"{job_id}.json"


class _Answer(msgspec.Struct):
    found: Found | None = None
    error: str = ""


class SqlJobs:
    """Running SQL queries. For all threads."""

    def __init__(self) -> None:
        self._room = threading.Semaphore(QUERIES_MAX)
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()

    def run(self, order: SqlOrder) -> Found:
        """Run a query and return its result. Raises WebError."""
        if not self._room.acquire(blocking=False):
            raise WebError(f"{QUERIES_MAX} queries run already: try again when one of them is done", 409)
        try:
            answer = self._ask(order)
        finally:
            self._room.release()
        if answer.found is None:
            raise WebError(answer.error, 422)
        return answer.found

    def close(self) -> None:
        with self._lock:
            for process in self._running:
                _end(process)

    def _ask(self, order: SqlOrder) -> _Answer:
        process = _start("sql", subprocess.PIPE)
        with self._lock:
            self._running.add(process)
        try:
            said, complaints = process.communicate(msgspec.json.encode(order), timeout=ANSWER_S)
            return decoding.decode_json(said, type=_Answer)
        except subprocess.TimeoutExpired:
            return _Answer(error=f"it took longer than {ANSWER_S:.0f} s, and was ended: 'immortal sql' waits longer")
        except decoding.DecodeError:
            last = complaints.decode("utf-8", "replace")[-SAID_CHARACTERS_MAX:].strip()
            return _Answer(error=f"its process ended with status {process.returncode}\n{last}".strip())
        finally:
            with self._lock:
                self._running.discard(process)
            _end(process)
            process.communicate()


def _start(what: str, stderr: int) -> subprocess.Popen[bytes]:
    """Start :func:`main` in a process with a session of its own, so that all its children can be killed with it."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "immortal.web.jobs", what],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env={**os.environ, "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0")},
        start_new_session=True,
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


# ``python -m immortal.web.jobs what-if|sql``: one what-if or one query, in a process of its own.
#
# Its order is JSON on stdin. A what-if writes lines of JSON with its progress, {"progress": [DONE, TOTAL]}. The last
# line is the result: {"report": {...}} of a what-if, {"found": {...}} of a query, or {"error": TEXT}.


PROGRESS_S = 0.2
ROWS_SHOWN_MAX = 500
CELL_CHARACTERS_MAX = 300
MEMORY_MB = 2048  # of the process of a query; the query itself can have half of it

Say = Callable[[dict[str, Any]], None]


class Order(msgspec.Struct, frozen=True):
    """Order of a what-if. ``old_app`` "": the app that made the log. ``code``: a folder or a wheel with the new class.
    ``checkpoint_id``, ``last`` None: the oldest, the newest."""

    home: str
    name: str
    new_app: str
    old_app: str = ""
    checkpoint_id: int | None = None
    last: int | None = None
    upgrade: bool = False
    code: str = ""
    limit: int = 100


def run_what_if_order(order: Order, progress: Any) -> dict[str, Any]:
    """Run a what-if; return the values of `immortal what-if --json`, with its text. Raises ImmortalError."""
    registry = Registry(order.home)
    settings = registry.load(order.name)
    with own_logs.open_reader(settings) as reader, tempfile.TemporaryDirectory(prefix="immortal-") as folder:
        route = plan_what_if(reader, checkpoint_id=order.checkpoint_id, last_sequence_id=order.last)
        old = OwnCode(order.old_app) if order.old_app else own_code_at_end(settings, reader.summary(), route)
        apps = {
            Side.OLD: AppCommand.of(old.app, settings=settings, code=old.archive),
            Side.NEW: AppCommand.of(order.new_app, settings=settings, code=Path(order.code) if order.code else None),
        }
        blob_paths = {side: Path(folder, side.value) for side in Side}
        outcome = run_what_if(
            reader,
            route,
            apps,
            upgrade_to=OWN_VERSION if order.upgrade else None,
            limit=order.limit,
            blob_paths=blob_paths,
            progress=progress,
        )
        if order.upgrade and order.checkpoint_id is None and not outcome.upgrade_error:
            outcome.upgrade_now_error = try_upgrade(reader, route, apps[Side.NEW], OWN_VERSION)
        report = Report(order.name, apps, outcome, reader, order.limit, blob_paths)
        lines = list(report.lines())
        return {**report.values(), "verdict": lines[-1], "lines": lines, "warnings": report.warnings}


class SqlOrder(msgspec.Struct, frozen=True):
    """Order of an SQL query. ``at`` "": now. ``names`` (): all instances that have a log."""

    home: str
    query: str
    at: str = ""
    names: tuple[str, ...] = ()


class Found(msgspec.Struct):
    """Result of an SQL query. ``cuts``: (instance, its last record that was shown)."""

    columns: list[str]
    rows: list[list[str]]
    has_more: bool
    cuts: list[tuple[str, int]]


def run_query(order: SqlOrder) -> Found:
    """Run an SQL query and return its result. Raises ImmortalError."""
    at: int | Time | None = parse_moment(order.at) if order.at else None
    with open_sql(Registry(order.home), order.names, at, order.query) as database:
        import duckdb

        database.seal(MEMORY_MB // 2)
        try:
            statements = database.connection.extract_statements(order.query)
            if [one.type for one in statements] != [duckdb.StatementType.SELECT]:
                raise WebError("one query that only reads was expected, such as select ... from ...")
            made = database.run(order.query)
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
    """Clip a text and replace what JSON can't carry, such as half a surrogate pair."""
    shown = text if len(text) <= CELL_CHARACTERS_MAX else f"{text[: CELL_CHARACTERS_MAX - 1]}…"
    return shown.encode("utf-8", "replace").decode()


def main(what: str) -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # users' classes may print

    def say(answer: dict[str, Any]) -> None:
        answers.write(msgspec.json.encode(answer) + b"\n")
        answers.flush()

    order = sys.stdin.buffer.read()
    if what == "sql":
        _answer_query(decoding.decode_json(order, type=SqlOrder), say)
    else:
        _answer_what_if(decoding.decode_json(order, type=Order), say)


def _answer_what_if(order: Order, say: Say) -> None:
    said_s = 0.0

    def progress(done: int, total: int | None) -> None:
        nonlocal said_s
        if time.monotonic() - said_s >= PROGRESS_S:
            said_s = time.monotonic()
            say({"progress": [done, total]})

    try:
        say({"report": run_what_if_order(order, progress)})
    except OutputDivergenceError as error:
        text = f"{error}\nThe old code does not do again what it did, so there is nothing to compare with: give the one"
        say({"error": f"{text} that made this log, or see 'immortal verify {order.name}'"})
    except ImmortalError as error:
        say({"error": str(error)})


def _answer_query(order: SqlOrder, say: Say) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_MB << 20, MEMORY_MB << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        say({"found": run_query(order)})
    except MemoryError:
        say({"error": f"it needs more than {MEMORY_MB} MiB of memory"})
    except (ImmortalError, OSError) as error:
        say({"error": str(error)})


if __name__ == "__main__":
    main(sys.argv[1])
