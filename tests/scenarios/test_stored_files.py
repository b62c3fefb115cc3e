"""A large file between two services that are killed: its bytes arrive, in bounded memory, and go with the logs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import threading
from pathlib import Path

from immortal.client import connect
from tests.helpers.cli import HOME, Run, immortal, wait_until

SIZE_MIB = int(os.environ.get("IMMORTAL_TEST_FILE_MIB", "300"))
MEMORY_KIB_MAX = 200 * 1024
APP = """
import hashlib
from pathlib import Path

import immortal
from immortal import Immortal, StoredFile, peer, query, rpc, store_file


def digest(stored: StoredFile) -> str:
    found = hashlib.sha256()
    with stored.open() as content:
        while chunk := content.read(1 << 20):
            found.update(chunk)
    return found.hexdigest()


class Camera(Immortal):
    vault = peer("films:Vault", "vault")

    @rpc
    async def begin(self, path: Path) -> None:
        await self.vault.keep(await immortal.effect(store_file, path))


class Vault(Immortal):
    digests: dict[str, str]
    files: list[StoredFile]

    def __init__(self) -> None:
        self.digests = {}
        self.files = []

    @rpc
    async def keep(self, stored: StoredFile) -> None:
        await immortal.step(self.note, stored, await immortal.effect(digest, stored))

    @rpc
    def note(self, stored: StoredFile, digest: str) -> None:
        self.files.append(stored)
        self.digests[stored.name] = digest

    @rpc
    def forget(self) -> None:
        self.digests = {}
        self.files = []

    @query
    def known(self) -> dict[str, str]:
        return self.digests
"""


def test_a_large_file_passes_between_services_under_kills(tmp_path: Path) -> None:
    (tmp_path / "films.py").write_text(APP)
    film = tmp_path / "film"
    expected = hashlib.sha256()
    with open(film, "wb") as file:
        for _ in range(SIZE_MIB):
            block = os.urandom(1 << 20)
            file.write(block)
            expected.update(block)
    name, home = f"sha256-{expected.hexdigest()}", tmp_path / HOME
    keeping = ["--keep-log-mb", "0", "--keep-checkpoints", "1", "--log-key", "none"]
    for one, app in (("camera", "films:Camera"), ("vault", "films:Vault")):
        immortal(tmp_path, "register", one, "--peer", "tcp://127.0.0.1:*", "--app", app, *keeping)
    runs = {one: Run(tmp_path, one, "--restart") for one in ("camera", "vault")}
    peaks: dict[int, int] = {}
    is_over = threading.Event()
    looking = threading.Thread(target=_look, args=(list(runs.values()), peaks, is_over))
    try:
        for run in runs.values():
            run.line("ready")
        looking.start()
        with connect("camera", home=home, timeout=None) as camera, connect("vault", home=home) as vault:
            call = threading.Thread(target=camera.begin, args=(film,))
            call.start()
            store = home / ".files"
            wait_until(lambda: store.is_dir() and bool(os.listdir(store)))  # it is being stored
            _kill(runs["camera"])
            wait_until(lambda: (store / name).exists())
            _kill(runs["vault"])
            call.join()
            assert vault.query.known() == {name: expected.hexdigest()}
        is_over.set()
        looking.join()
        assert len(peaks) >= 4
        assert max(peaks.values()) < MEMORY_KIB_MAX, peaks
        print({"MiB": SIZE_MIB, "peaks_mib": sorted(peak >> 10 for peak in peaks.values())})

        for one in ("camera", "vault"):
            immortal(tmp_path, "checkpoint", one)
        assert _gc(tmp_path)["unused"] == 1  # the part that a killed app left behind
        assert os.listdir(store) == [name]
        with connect("vault", home=home) as vault:
            vault.forget()
        assert _gc(tmp_path, "--dry-run")["unused"] == 0  # an older checkpoint, or a record, has it still
        for one in ("camera", "vault"):
            immortal(tmp_path, "checkpoint", one)
            immortal(tmp_path, "checkpoint", one)
        assert _gc(tmp_path, "--dry-run")["unused"] == 1
        assert (store / name).exists()
        assert _gc(tmp_path)["unused"] == 1
        assert os.listdir(store) == []
        for run in runs.values():
            assert run.stop() == 0
        immortal(tmp_path, "verify", "camera")
    finally:
        is_over.set()
        for run in runs.values():
            run.kill()


def _gc(folder: Path, *options: str) -> dict[str, int]:
    (said,) = json.loads(immortal(folder, "files", "gc", "--older-than-days", "0", "--json", *options))["stores"]
    return dict(said)


def _processes(run: Run) -> list[int]:
    """Return the coordinator and the app of a supervisor."""
    own = run.process.pid
    return [int(pid) for pid in Path(f"/proc/{own}/task/{own}/children").read_text().split()]


def _kill(run: Run) -> None:
    for pid in _processes(run):
        os.kill(pid, signal.SIGKILL)
    run.line("ready", run.count("ready") + 1)


def _look(runs: list[Run], peaks: dict[int, int], is_over: threading.Event) -> None:
    """Note the most memory that each process has had, in KiB."""
    while not is_over.wait(0.05):
        for pid in [pid for run in runs for pid in _processes(run)]:
            with contextlib.suppress(OSError, StopIteration):  # it has ended
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                peaks[pid] = int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))
