"""settings: all that a settings file may say, from its schema."""

from __future__ import annotations

from collections.abc import Iterator

import click
from msgspec import Struct

from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.config.setting import Setting, settings_of
from immortal.protocol.command_line import echo

_HEADINGS = ("setting", "what it must be", "without it", "what it is for")


@click.command()
def settings() -> None:
    """Show what a settings file may say, as the Markdown table of docs/guide/settings.md."""
    for row in (_HEADINGS, ["---"] * len(_HEADINGS), *_rows(InstanceSettings)):
        echo(f"| {' | '.join(row)} |")


def _rows(schema: type[Struct], table: str = "") -> Iterator[tuple[str, str, str, str]]:
    for setting in settings_of(schema).values():
        name = f"{table}{setting.name}"
        if setting.schema is not None:
            yield from _rows(setting.schema, f"{name}.")
        else:
            yield f"`{name}`", _expected(setting), _without(setting), setting.text


def _expected(setting: Setting) -> str:
    if setting.is_table:
        return f"a table [{setting.name}], for each name {setting.of_each.expected}"
    unit = setting.about.get("unit")
    return f"{setting.expected} ({unit})" if unit else setting.expected


def _without(setting: Setting) -> str:
    return "an error" if setting.is_required else "nothing" if setting.is_table else setting.default_text
