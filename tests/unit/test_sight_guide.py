"""docs/how-to/sight.md names each table, option and column that there is."""

from __future__ import annotations

import re
from pathlib import Path

import click

from immortal.cli.sql import sql
from immortal.cli.trace import trace
from immortal.pipeline.sql.database import FLEET_STATES, LOG_TABLES
from immortal.pipeline.sql.states import AS_OF

GUIDE = (Path(__file__).parents[2] / "docs" / "how-to" / "sight.md").read_text()


def test_the_tables() -> None:
    (table,) = re.findall(r"^Tables have a row for:\n\n((?:[- ] .*\n)+)", GUIDE, re.MULTILINE)
    rows = re.findall(r"^- ((?:`\w+`(?:, )?)+): ", table, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named - {"NAME"} == {*LOG_TABLES, *FLEET_STATES}
    assert f"`{AS_OF}`" in GUIDE


def test_the_options() -> None:
    commands = [sql, *trace.commands.values()]
    options = {
        option
        for command in commands
        for parameter in command.params
        if isinstance(parameter, click.Option)
        for option in parameter.opts
    }
    missing = {option for option in options if option.startswith("--") and option not in GUIDE}
    assert missing <= {"--instance", "--trust-pickle"}  # it shows -i; the other is everywhere
    assert {option for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*", GUIDE) if option not in options} == {
        "--state",  # of replay
        "--timings-limit-mb",  # of register
    }
