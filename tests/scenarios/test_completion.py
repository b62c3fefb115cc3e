"""Completion in bash, and that neither it nor the list of commands loads what the commands need."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from immortal import cli
from tests.helpers.projects import immortal

BIN = Path(sys.executable).parent


def completed(folder: Path, *lines: str) -> list[list[str]]:
    """What bash offers for the last word of each line."""
    script = """
        eval "$(_IMMORTAL_COMPLETE=bash_source immortal)"
        while read -ra COMP_WORDS; do
            COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMPREPLY=()
            _immortal_completion immortal "${COMP_WORDS[-1]}" "${COMP_WORDS[-2]}" < /dev/null
            echo "${COMPREPLY[@]}"
        done
    """
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        input="".join(f"immortal {line}\n" for line in lines),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"},
    )
    assert done.stderr == ""
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
def test_commands_options_and_names_of_instances(tmp_path: Path) -> None:
    for name in ("shop", "stock", "till"):
        immortal(tmp_path, "register", name, "--peer", "tcp://127.0.0.1:*")
    of_names = [f"{command} s" for command in ("run", "stop", "status", "logs", "verify")]
    lines = ("up", "run --rest", "init --template a", "--home elsewhere run s", *of_names)
    assert completed(tmp_path, *lines) == [["up", "upgrade"], ["--restart"], ["agent"], [], *[["shop", "stock"]] * 5]


@pytest.mark.parametrize("name", sorted(cli._MODULES))
def test_each_command_is_in_its_module_and_its_summary_fits_a_line(name: str) -> None:
    module, summary = cli._MODULES[name]
    assert isinstance(getattr(importlib.import_module(module), name.replace("-", "_")), click.Command)
    assert len(summary) <= 80 - len("  coordinator  ")


@pytest.mark.parametrize("how", ["main(['--help'])", "main([])", "completed()"])
def test_what_lists_commands_loads_none_of_them(how: str, tmp_path: Path) -> None:
    source = f"""
import sys
from click.shell_completion import BashComplete
from immortal.cli import main
def completed():
    found = BashComplete(main, {{}}, "immortal", "_IMMORTAL_COMPLETE").get_completions([], "")
    assert len(found) > 20
try:
    {how}
except SystemExit:
    pass
print([name for name in ("zmq", "lmdb", "rich") if name in sys.modules])
print([name for name in ("bench", "pipeline", "replay", "appsdk") if f"immortal.{{name}}" in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", source], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines()[-2:] == ["[]", "[]"]
