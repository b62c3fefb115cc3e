"""A backend that another package brings: the program of the demo runs on it, and commands read its logs."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from immortal.coordinator.core.errors import LogError
from immortal.coordinator.log.open import backend_of, place_of
from tests.soak.service import APP, COORDINATOR, wait_for
from tests.soak.workloads import WordCount

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """As somebody else's package is installed: what it registers says where the backend is."""
    installed = tmp_path / "installed"
    about = installed / "toy-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[immortal.log_backends]\ntoy = tests.helpers.toy_backend:ToyPlace\n")
    monkeypatch.syspath_prepend(str(installed))
    yield installed
    backend_of.cache_clear()


def immortal(workload: WordCount, package: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    home = workload.services[0].settings.folder.parent
    return subprocess.run(
        [sys.executable, "-m", "immortal", "--home", str(home), *arguments],
        env={**os.environ, "PYTHONPATH": f"{package}:{REPOSITORY}"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_demo_counts_each_word_once_on_it(tmp_path: Path, package: Path) -> None:
    environment = {"PYTHONPATH": f"{package}:{REPOSITORY}"}
    workload = WordCount(tmp_path, random.Random(5), environment, log=f"toy:{tmp_path}/{{name}}.toy")
    services = workload.services
    try:
        for service in services:
            service.start()
        for number in range(4):
            for service in services:
                wait_for(
                    lambda service=service: service.ready,
                    lambda service=service: f"it is ready\n{service.tail()}",
                )
            workload.feed()
            services[number % 2].kill((COORDINATOR, APP)[number // 2])
        workload.settle()
        status = immortal(workload, package, "status")
        assert status.stdout.count(" running ") == 2, status
        shown = immortal(workload, package, "log", "show", "counter")
        assert "from reader" in shown.stdout, shown
    finally:
        for service in services:
            service.stop()
    assert "equal" in workload.check()
    for name in ("counter", "reader"):
        assert place_of(f"toy:{tmp_path}/{name}.toy").exists()
    verified = immortal(workload, package, "log", "verify", "counter")
    assert (verified.returncode, verified.stderr) == (0, ""), verified
    refused = immortal(workload, package, "recover", "counter", "--truncate-at", "3", "--force", "--yes")
    assert refused.returncode == 1
    assert "can't be cut: only a log in a folder (lmdb:) can" in refused.stderr
    deleted = immortal(workload, package, "unregister", "counter", "--delete-log")
    assert deleted.returncode == 0, deleted
    assert not Path(tmp_path / "counter.toy").exists()


def test_a_backend_that_nobody_brings_is_named() -> None:
    with pytest.raises(LogError, match=r"no backend for logs papyrus: is known, only lmdb:, memory:"):
        place_of("papyrus:scroll")


def test_a_backend_that_cannot_be_loaded_is_named(package: Path) -> None:
    about = package / "toy-1.dist-info" / "entry_points.txt"
    about.write_text("[immortal.log_backends]\ntoy = no.such.module:Place\n")
    with pytest.raises(LogError, match=r"the backend 'no.such.module:Place' of logs toy: cannot be loaded"):
        place_of("toy:x")


def test_an_instance_is_not_registered_with_a_log_that_nobody_can_open(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "immortal", "--home", str(tmp_path), "register", "counter"]
    done = subprocess.run(
        [*command, "--peer", "tcp://127.0.0.1:*", "--log", "papyrus:scroll"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: no backend for logs papyrus: is known"), done.stderr
    assert not (tmp_path / "counter.toml").exists()
