"""What `immortal --help` has loaded: its start takes 0.12 s of processor time, and each module that joins adds to that.

The time itself is measured by no test, since a machine that others use has its own. A module that belongs in here is
worth its place in each start of each command, of shells that complete names, and of coordinators.
"""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import json, pathlib, sys  # pathlib loads urllib until Python 3.12
before = set(sys.modules)
from immortal.cli import main
main(["--help"], standalone_mode=False)
print(json.dumps(sorted(set(sys.modules) - before)))
"""
OURS = {
    "immortal",
    "immortal.protocol.decoding",
    "immortal.coordinator",
    "immortal.cli",
    "immortal.coordinator.config",
    "immortal.coordinator.config.socket_addresses",
    "immortal.coordinator.config.settings_file",
    "immortal.coordinator.config.schema",
    "immortal.coordinator.config.values",
    "immortal.coordinator.core",
    "immortal.coordinator.core.errors",
    "immortal.coordinator.core.limits",
    "immortal.coordinator.core.permissions",
    "immortal.coordinator.fault_points",
    "immortal.coordinator.instances",
    "immortal.coordinator.instances.registry",
    "immortal.coordinator.log_url",
    "immortal.protocol",
    "immortal.protocol.command_line",
    "immortal.protocol.compiled",
    "immortal.protocol.distribution",
    "immortal.protocol.errors",
    "immortal.protocol.extensions",
    "immortal.protocol.files",
    "immortal.protocol.process",
    "immortal.protocol.redaction",
    "immortal.protocol.system_methods",
    "immortal.protocol.limits",
    "immortal.protocol.messages",
    "immortal.protocol.shared_registry",
    "immortal.protocol.safe_output",
    "immortal.protocol.varint",
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
    ours = {name for name in modules if name.partition(".")[0] == "immortal"}
    assert ours <= OURS, "another module of ours is loaded by each command: import it inside the function that needs it"
    foreign = {name.partition(".")[0] for name in modules - ours} - sys.stdlib_module_names
    compiled = {name for name in foreign if name.startswith(("_cython_", "cython_", "immortal__mypyc"))}
    assert foreign - compiled <= OTHERS
    assert not {name.partition(".")[0] for name in modules} & SLOW
