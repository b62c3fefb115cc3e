"""What `immortal --help` has loaded: its start takes 0.12 s of processor time, and each module that joins adds to that.

The time itself is measured by no test, since a machine that others use has its own. A module that belongs in here is
worth its place in each start of each command, of shells that complete names, and of coordinators.
"""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import json, sys
before = set(sys.modules)
from coordinator.cli import main
main(["--help"], standalone_mode=False)
print(json.dumps(sorted(set(sys.modules) - before)))
"""
OURS = {
    "protocol.decoding",
    "coordinator",
    "coordinator.cli",
    "coordinator.cli.commands",
    "coordinator.config",
    "coordinator.config.app_hosts",
    "coordinator.config.reading",
    "coordinator.config.schema",
    "coordinator.config.setting",
    "coordinator.config.socket_paths",
    "coordinator.config.values",
    "coordinator.config.writing",
    "coordinator.core",
    "coordinator.core.errors",
    "coordinator.core.limits",
    "coordinator.core.permissions",
    "coordinator.fault_points",
    "coordinator.instances",
    "coordinator.instances.registry",
    "coordinator.log_url",
    "protocol",
    "protocol.command_line",
    "protocol.compiled",
    "protocol.errors",
    "protocol.extensions",
    "protocol.file_lock",
    "protocol.forks",
    "protocol.handlers",
    "protocol.limits",
    "protocol.messages",
    "protocol.nodes",
    "protocol.ordering",
    "protocol.private_files",
    "protocol.shared_home",
    "protocol.shown",
    "protocol.varint",
}
OTHERS = {"click", "msgspec", "typing_extensions"}
SLOW = {
    "asyncio",
    "concurrent",
    "ctypes",
    "email",
    "http",
    "logging",
    "multiprocessing",
    "sqlite3",
    "ssl",
    "subprocess",
}
SLOW |= {"tempfile", "unittest", "urllib", "xml"}


def loaded() -> set[str]:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_help_loads_no_more_than_it_needs() -> None:
    modules = loaded()
    ours = {
        name
        for name in modules
        if name.partition(".")[0] in ("appsdk", "bench", "coordinator", "pipeline", "protocol", "replay")
    }
    assert ours <= OURS, "another module of ours is loaded by each command: import it inside the function that needs it"
    foreign = {name.partition(".")[0] for name in modules - ours} - sys.stdlib_module_names
    compiled = {name for name in foreign if name.startswith(("_cython_", "cython_", "coordinator__mypyc"))}
    assert foreign - compiled <= OTHERS
    assert not {name.partition(".")[0] for name in modules} & SLOW
