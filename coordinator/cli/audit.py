"""audit: who was let in and refused, and what operators did; whether any of it was changed since."""

from __future__ import annotations

import sys
from typing import Any

import click

from immortal.coordinator.audit import audit_log
from immortal.coordinator.cli.common import name_argument, pass_registry
from immortal.coordinator.instances.registry import Registry
from immortal.protocol.command_line import echo, echo_json, json_option

_FRONT = ("time", "what", "previous")


@click.command()
@name_argument
@click.option("--verify", is_flag=True, help="Only say whether the lines are those that were written.")
@click.option("--head", metavar="HASH", help="With --verify: the line with this hash must be there too.")
@json_option
@pass_registry
def audit(registry: Registry, name: str, verify: bool, head: str | None, as_json: bool) -> None:
    """Show who was let in, who was refused, and what operators did with NAME.

    Each line names the hash of the one before; the exit status is 1 where one does not fit.
    """
    if head is not None and not verify:
        raise click.UsageError("--head goes with --verify")
    folder = registry.load(name).folder
    count, newest, first_problem, head_found = 0, "", "", head is None
    for line in audit_log.lines(folder):
        count, newest = count + 1, line.hash
        head_found = head_found or line.hash == head
        if line.problem and not first_problem:
            first_problem = f"{line.file}, line {line.number}: it {line.problem}"
        if verify:
            continue
        if as_json:
            echo_json({**line.entry, "hash": line.hash, **({"problem": line.problem} if line.problem else {})})
        else:
            echo(_in_words(line))
    if not first_problem and not head_found:
        first_problem = f"no line has the hash {head}: lines were removed, or it is another instance's"
    if verify and as_json:
        echo_json({"sound": not first_problem, "lines": count, "head": newest, "problem": first_problem or None})
    elif first_problem:
        echo(f"error: {first_problem}", err=True)
    elif verify:
        echo(f"sound: {count} lines; the newest has the hash {newest}" if count else "sound: there is no line yet")
    elif not count:
        echo(f"nothing to show: {name} has no audit log yet", err=True)
    sys.exit(1 if first_problem else 0)


def _in_words(line: audit_log.Line) -> str:
    entry: dict[str, Any] = line.entry
    fields = " ".join(f"{key}={value}" for key, value in entry.items() if key not in _FRONT)
    problem = f"  ({line.problem})" if line.problem else ""
    return f"{entry.get('time', '?')}  {entry.get('what', '?')}  {fields}{problem}"
