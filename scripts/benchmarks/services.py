"""Services of the suite beside plain processes: one `immortal run` each, which is ready when it is returned."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

from immortal.bench.processes import BenchError
from immortal.coordinator.service.parent_death import die_with_parent


def start_service(stack: ExitStack, home: Path, name: str, app: str) -> list[int]:
    """Register and run it until ``stack`` ends; the process IDs of its coordinator and its app. Raises BenchError."""
    coordinator = [sys.executable, "-m", "immortal.coordinator", "--home", str(home)]
    register = [*coordinator, "register", name, "--peer", "tcp://127.0.0.1:*"]
    subprocess.run(register, check=True, stdout=subprocess.DEVNULL)
    process = subprocess.Popen(
        [*coordinator, "run", name, app],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=die_with_parent(os.getpid()),
    )
    stack.callback(process.wait)
    stack.callback(process.kill)
    assert process.stderr is not None
    lines = process.stderr
    said = ""
    while not said.endswith("ready\n"):
        line = lines.readline()
        if not line:
            raise BenchError(f"{name} has ended before it was ready:\n{said}")
        said += line
    threading.Thread(target=lines.read, daemon=True).start()  # or it would wait to be read
    return [int(pid) for pid in re.findall(r"_pid=(\d+)", said)]
