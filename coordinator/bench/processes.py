"""The four processes of a benchmark run, in a registry of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from coordinator import app_secret, control, keys
from coordinator.app_addresses import default_app_socket
from coordinator.config import InstanceSettings
from coordinator.registry import Registry
from protocol.errors import ImmortalError

START_TIMEOUT_S = 30.0
POLL_INTERVAL_S = 0.002


class BenchError(ImmortalError):
    """The benchmark could not be run, or its result is wrong."""


class Service:
    """One instance: its coordinator and its app. Output that is not asked for goes to files in the registry."""

    def __init__(self, settings: InstanceSettings, app: str, environment: dict[str, str]) -> None:
        self.settings = settings
        self._app = app
        self._environment = environment
        self.coordinator: subprocess.Popen[str] | None = None
        self.app: subprocess.Popen[str] | None = None

    def start(self) -> None:
        settings = self.settings
        with open(settings.folder / "errors.txt", "a") as errors:
            self.coordinator = subprocess.Popen(
                [sys.executable, "-m", "coordinator", "coordinator", settings.name],
                env=self._environment,
                stderr=errors,
                text=True,
            )
            self.app = subprocess.Popen(
                [sys.executable, "-m", "appsdk", self._app],
                env={
                    **self._environment,
                    "IMMORTAL_APP_ADDRESS": settings.app_nearest_address,
                    app_secret.SECRET_FILE_VARIABLE: str(app_secret.path(settings.folder)),
                },
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def check_alive(self) -> None:
        for what, process in (("coordinator", self.coordinator), ("app", self.app)):
            if process is not None and process.poll() is not None:
                errors = (self.settings.folder / "errors.txt").read_text()
                status = process.returncode
                raise BenchError(f"{self.settings.name}'s {what} ended with status {status}:\n{errors[-2000:]}")

    def status(self) -> dict[str, Any] | None:
        """What the coordinator says; None while it is not up."""
        self.check_alive()
        try:
            return control.query(self.settings.folder, "status", timeout_s=2.0)
        except control.ControlError:
            return None

    def wait_for_phase(self, phase: str) -> float:
        """Seconds until the coordinator is in ``phase``."""
        begun = time.perf_counter()
        while True:
            status = self.status()
            if status is not None and status["phase"] == phase and not status["backlog_records"]:
                return time.perf_counter() - begun
            if time.perf_counter() - begun > START_TIMEOUT_S:
                raise BenchError(f"{self.settings.name!r} is not in phase {phase!r} after {START_TIMEOUT_S:.0f} s")
            time.sleep(POLL_INTERVAL_S)

    def peak_memory_mib(self) -> tuple[float, float]:
        """Peak resident memory of (coordinator, app)."""
        return (
            _peak_memory_mib(self.coordinator.pid if self.coordinator else 0),
            _peak_memory_mib(self.app.pid if self.app else 0),
        )

    def kill(self) -> None:
        """kill -9 for both, and wait until they are gone."""
        for process in (self.app, self.coordinator):
            if process is not None:
                process.kill()
                process.wait()
                if process.stdout is not None:
                    process.stdout.close()
        self.app = self.coordinator = None


def _peak_memory_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0


def register(home: Path, apps: dict[str, str], variables: dict[str, str], *, curve: bool = False) -> dict[str, Service]:
    """Register an instance for each (name, "module:Class") of ``apps`` in ``home``; with ``curve`` all have keys."""
    registry = Registry(home)
    environment = {**os.environ, **variables, "IMMORTAL_HOME": str(home), "PYTHONHASHSEED": "0"}
    services = {}
    for name, app in apps.items():
        app_socket = default_app_socket(registry.home / name)  # as under `immortal run`
        settings = registry.register(name, "tcp://127.0.0.1:*", app_socket=app_socket)
        settings.folder.mkdir(parents=True, exist_ok=True)
        if curve:
            keys.make(settings.folder)
        services[name] = Service(settings, app, environment)
    return services
