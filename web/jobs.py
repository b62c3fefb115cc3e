"""Jobs of the page: what-ifs and SQL queries, each in a process, a few at a time. A what-if keeps its address."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from immortal.coordinator.config import write_atomically
from immortal.protocol import decoding
from immortal.protocol.files import make_folder
from immortal.web import WebError
from immortal.web.orders import Found, Order, SqlOrder

WHAT_IFS_MAX = 2  # at once; each runs two apps
KEPT_MAX = 200
LIST_MAX = 20
QUERIES_MAX = 2  # at once; each may replay several services
ANSWER_S = 120.0  # the first query of a large log writes its columns
SAID_CHARACTERS_MAX = 2000  # of the last words of a process that gave no answer
_ID = re.compile(r"[0-9a-f]{12}")


class Job(msgspec.Struct):
    """Job of a what-if. ``state``: running, done, failed, cancelled. ``report``: as of `immortal what-if --json`; for
    the fleet as of :func:`immortal.presenters.what_if_fleet.fleet_report`."""

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
            self._save(job)
            process = _start("what-if" if order.fleet is None else "fleet", subprocess.DEVNULL)
            self._running[job.id] = job, process
        threading.Thread(target=self._follow, args=(job, process), name=f"what-if {job.id}", daemon=True).start()
        return job

    def job(self, name: str, job_id: str) -> Job:
        """Return a what-if of an instance, or of the fleet ("") by its ID. Raises WebError if there is none."""
        job = self._job(job_id)
        if job.order.name != name:
            raise WebError(f"there is no what-if {job_id} here", 404)
        return job

    def _job(self, job_id: str) -> Job:
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

    def of_instance(self, name: str) -> list[Job]:
        """Return the last what-ifs of an instance, or of the fleet (""), the newest first."""
        found = []
        for path in self._paths():
            try:
                job = self._job(path.stem)
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
        try:
            self._save(job)
        finally:
            with self._lock:
                del self._running[job.id]

    def _save(self, job: Job) -> None:
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
            answer = self._run_query(order)
        finally:
            self._room.release()
        if answer.found is None:
            raise WebError(answer.error, 422)
        return answer.found

    def close(self) -> None:
        with self._lock:
            for process in self._running:
                _end(process)

    def _run_query(self, order: SqlOrder) -> _Answer:
        process = _start("sql", subprocess.PIPE)
        with self._lock:
            self._running.add(process)
        try:
            said, complaints = process.communicate(msgspec.json.encode(order), timeout=ANSWER_S)
            return decoding.decode_json(said, type=_Answer)
        except subprocess.TimeoutExpired:
            return _Answer(
                error=f"the query took longer than {ANSWER_S:.0f} s and was ended: 'immortal sql' waits longer"
            )
        except decoding.DecodeError:
            last = complaints.decode("utf-8", "replace")[-SAID_CHARACTERS_MAX:].strip()
            return _Answer(error=f"its process ended with status {process.returncode}\n{last}".strip())
        finally:
            with self._lock:
                self._running.discard(process)
            _end(process)
            process.communicate()


def _start(what: str, stderr: int) -> subprocess.Popen[bytes]:
    """Start :mod:`immortal.web.orders` in a session of its own, so that all its children can be killed with it."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "immortal.web.orders", what],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env={**os.environ, "PYTHONHASHSEED": "0" if what == "fleet" else os.environ.get("PYTHONHASHSEED", "0")},
        start_new_session=True,
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
