"""The how-tos for operators: their programs run, and their commands and options exist."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest

from immortal.cli import main
from immortal.cli.what_if import _fleet

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to"
PAGES = (
    "operations",
    "runbook",
    "monitor",
    "standby",
    "pause",
    "checkpoints",
    "backup",
    "recover",
    "upgrade",
    "dead-letters",
    "clock",
    "time-travel",
    "verify",
    "what-if",
)
GUIDE = "\n".join((HOW_TO / f"{page}.md").read_text() for page in PAGES)
PROGRAMS = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", GUIDE, re.DOTALL))
COMMANDS = [line.removeprefix("$ ") for line in GUIDE.splitlines() if line.startswith("$ immortal ")]
MENTIONED = [text for text in re.findall(r"`(immortal [^`]+)`", GUIDE.replace("\n", " ")) if "NAME" not in text]


def test_the_programs_of_the_guide(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Any] = {}
    for name, source in PROGRAMS.items():
        module = made[name] = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        exec(compile(source, f"{name}.py", "exec"), module.__dict__)
    assert sorted(made) == ["clock", "hide", "shop", "shop2"]
    upgraded = made["shop2"].Stock.upgrade(made["shop"].Stock())
    assert upgraded.left == {"tea": 10, "rice": 8, "salt": 0}
    made["clock"].Clock().tick()


def parsed(line: str) -> Iterator[str]:
    """The names of the commands of one command line, whose options exist."""
    command: click.Command = main
    arguments = shlex.split(line)[1:]
    context = click.Context(main)
    while isinstance(command, click.Group):
        taken = sum(isinstance(parameter, click.Argument) for parameter in command.params)
        del arguments[:taken]
        if not arguments and command.invoke_without_command:
            return
        name = arguments.pop(0)
        found = command.get_command(context, name)
        assert found is not None, f"{line}: there is no {name!r}"
        command = found
        yield name
    if "--fleet" in arguments:
        arguments.remove("--fleet")
        command = _fleet
    command.make_parser(click.Context(command)).parse_args(arguments)


@pytest.mark.parametrize("line", sorted({*COMMANDS, *MENTIONED}))
def test_the_commands_of_the_guide_exist(line: str) -> None:
    assert list(parsed(line))


def test_every_command_of_an_operator_is_in_the_guide() -> None:
    used = {next(parsed(line)) for line in COMMANDS}
    assert used == {
        "register",
        "status",
        "stop",
        "restart",
        "checkpoint",
        "pause",
        "resume",
        "dead-letters",
        "skip",
        "replay",
        "verify",
        "what-if",
        "sample",
        "why",
        "upgrade",
        "up",
        "clock",
        "health",
        "run",
        "log",
        "recover",
        "peers",
        "restore",
    }
