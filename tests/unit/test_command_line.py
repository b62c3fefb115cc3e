"""Tables: aligned, whole where a program reads them, plain where nobody sees colours."""

from __future__ import annotations

import signal

import click
import pytest
from click.testing import CliRunner

from immortal.protocol.command_line import Commands, print_table, table_lines


def test_a_table_is_aligned_and_may_be_empty() -> None:
    assert list(table_lines(("name", "n"), [("a", "1"), ("long one", "1,000")], right=("n",))) == [
        "name          n",
        "a             1",
        "long one  1,000",
    ]
    assert list(table_lines(("name", "n"), [], right=("n",))) == ["name  n"]


def test_what_a_program_reads_is_neither_cut_off_nor_folded_nor_coloured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    cells = ("a" * 300, "[red]b[/red]", "1")
    print_table(("instance", "endpoint", "record"), [cells], right=("record",))
    assert capsys.readouterr().out.splitlines()[1].split() == list(cells)
    assert list(table_lines(("instance", "endpoint", "record"), [cells]))[1].split() == list(cells)


def test_a_terminal_folds_what_it_has_no_room_for_and_no_color_is_heeded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # for rich: a terminal
    monkeypatch.setenv("COLUMNS", "40")
    print_table(("name", "n"), [("a" * 60, "1")])
    coloured = capsys.readouterr().out
    assert "\x1b[1m" in coloured
    assert max(len(line) for line in coloured.splitlines()[1:]) <= 40
    assert coloured.count("a") == 60 + 1  # "name"
    monkeypatch.setenv("NO_COLOR", "1")
    print_table(("name", "n"), [("a", "1")])
    assert "\x1b[3" not in capsys.readouterr().out  # a colour; bold is none


def test_a_cell_obeys_nothing_that_is_in_it_and_keeps_its_lines() -> None:
    assert list(table_lines(("name",), [("one\x1b[31m\ntwo",)])) == ["name", "one\\x1b[31m", "two"]


def test_an_interrupted_command_says_so_with_the_status_of_its_signal() -> None:
    """It was "Aborted!" and 1, as for a failure."""

    @click.group(cls=Commands)
    def outer() -> None: ...

    @outer.group(cls=Commands)
    def inner() -> None: ...

    @inner.command()
    def wait() -> None:
        signal.raise_signal(signal.SIGINT)

    result = CliRunner().invoke(outer, ["inner", "wait"])
    assert (result.exit_code, result.output) == (130, "error: interrupted\n")
