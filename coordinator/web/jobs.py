"""What-ifs that run, and those that have: each with an address that stays, as a file in the home."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from immortal.coordinator.config import write_atomically
from immortal.coordinator.web.errors import WebError
from immortal.coordinator.web.notes import FOLDER_NAME
from immortal.coordinator.web.what_if_job import Order
from immortal.protocol import decoding
from immortal.protocol.private_files import make_folder

AT_ONCE_MAX = 2  # each runs two apps beside one another
KEPT_MAX = 200
LIST_MAX = 20
_ID = re.compile(r"[0-9a-f]{12}")


class Job(msgspec.Struct):
    """``state``: running, done, failed, cancelled. ``report``: as `immortal what-if --json`."""

    id: str
    order: Order
    state: str
    started_ns: int
    done: int = 0
    total: int | None = None
    error: str = ""
    report: dict[str, Any] | None = None


class Jobs:
    """For all threads."""

    def __init__(self, home: Path) -> None:
        self._folder = home / FOLDER_NAME / "what-if"
        self._lock = threading.Lock()
        self._running: dict[str, tuple[Job, subprocess.Popen[bytes]]] = {}

    def start(self, order: Order) -> Job:
        """Raises WebError where enough of them run."""
        job = Job(secrets.token_hex(6), order, "running", time.time_ns())
        with self._lock:
            if len(self._running) >= AT_ONCE_MAX:
                raise WebError(f"{AT_ONCE_MAX} what-ifs run already: wait for one of them, or cancel it", 409)
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "immortal.coordinator.web.what_if_job"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0")},
                start_new_session=True,
            )
            self._running[job.id] = job, process
        self._keep(job)
        threading.Thread(target=self._follow, args=(job, process), name=f"what-if {job.id}", daemon=True).start()
        return job

    def job(self, job_id: str) -> Job:
        """Raises WebError where there is none."""
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
        """The last ones of an instance, the newest first."""
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
            running[1].kill()

    def close(self) -> None:
        with self._lock:
            running = list(self._running.values())
        for _, process in running:
            process.kill()

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
            process.kill()
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
        """The newest first."""

        def age(path: Path) -> float:
            try:
                return -path.stat().st_mtime
            except OSError:
                return 0

        return sorted(self._folder.glob("*.json"), key=age)

    def _path(self, job_id: str) -> Path:
        return self._folder / f"{job_id}.json"
