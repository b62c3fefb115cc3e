"""A sync that fails, in a real coordinator: a small library in front of libc makes it fail on demand."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.processes import TOLD, House

SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

int fdatasync(int descriptor) {
    static int (*real)(int);
    const char *trigger = getenv("FAILING_SYNC");
    if (trigger && access(trigger, F_OK) == 0) {
        errno = EIO;
        return -1;
    }
    if (!real)
        real = (int (*)(int))dlsym(RTLD_NEXT, "fdatasync");
    return real(descriptor);
}

ssize_t pwrite(int descriptor, const void *data, size_t size, off_t offset) {
    static ssize_t (*real)(int, const void *, size_t, off_t);
    const char *trigger = getenv("FAILING_SYNC");
    if (!real)
        real = (ssize_t (*)(int, const void *, size_t, off_t))dlsym(RTLD_NEXT, "pwrite");
    ssize_t written = real(descriptor, data, size, offset);
    if (trigger && fcntl(descriptor, F_GETFL) & O_DSYNC && access(trigger, F_OK) == 0) {
        errno = EIO;
        return -1;
    }
    return written;
}

ssize_t pwrite64(int descriptor, const void *data, size_t size, off_t offset) {
    return pwrite(descriptor, data, size, offset);
}
"""


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path / "home")
    yield house
    house.close()


@pytest.fixture
def trigger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A path: while a file is there, each fdatasync, and each write that syncs itself, of processes started from now on
    fails with EIO."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to make the failing fdatasync with")
    source, library, trigger = tmp_path / "shim.c", tmp_path / "shim.so", tmp_path / "fail"
    source.write_text(SHIM)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("FAILING_SYNC", str(trigger))
    return trigger


@pytest.mark.parametrize("padding", [0, 100_000], ids=["inline", "on the thread"])
def test_a_failed_sync_stops_the_coordinator_and_is_never_retried(house: House, trigger: Path, padding: int) -> None:
    house.register("alice")
    process, app = house.both("alice", extended=True)
    for number in range(1, 11):
        app.impulse(number, TOLD, padding)
    app.until(lambda: app.accepted == 10)
    trigger.touch()
    app.impulse(11, TOLD, padding)
    line = process.failed()
    assert "Input/output error" in line
    assert app.until_closed().accepted == 10
    trigger.unlink()
    process, again = house.both("alice", extended=True)
    # The eleventh was never accepted: it may be there or not, since what the disk did is unknown.
    assert again.state["told"] in (list(range(1, 11)), list(range(1, 12)))
