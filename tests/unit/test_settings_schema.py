"""One field of the schema is all that a setting needs: it is read, checked, written, an option, and in the docs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import click
import pytest
from click.testing import CliRunner
from msgspec import NODEFAULT, Struct, inspect, structs

from immortal.cli import main
from immortal.cli import registration as settings_command
from immortal.cli.options import register_options
from immortal.coordinator.config import (
    ConfigError,
    InstanceSettings,
    check_settings,
    override,
    read_settings,
    settings_text,
)
from immortal.coordinator.config.schema import Setting, settings_of
from immortal.coordinator.config.values import doc, whole
from immortal.coordinator.instances.registry import Registry
from scripts.docs_site.tables import with_tables

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "settings.md"
PEER = "tcp://127.0.0.1:7001"


class Extended(InstanceSettings, frozen=True, kw_only=True):
    """The settings with one more."""

    grace_s: Annotated[int, whole(1, 60, "seconds"), doc("How long it waits before it gives up.")] = 5


@pytest.fixture
def extended(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("coordinator.config.settings_file", "cli.options", "cli.registration"):
        monkeypatch.setattr(f"immortal.{module}.InstanceSettings", Extended)


def all_settings(schema: type[Struct] = InstanceSettings) -> Iterator[Setting]:
    for setting in settings_of(schema).values():
        if setting.schema is None:
            yield setting
        else:
            yield from all_settings(setting.schema)


@pytest.mark.usefixtures("extended")
def test_a_new_setting_is_one_field(tmp_path: Path) -> None:
    path = tmp_path / "counter.toml"
    settings: Any = check_settings({"peer": PEER, "grace_s": 7}, "counter", path)
    assert settings.grace_s == 7
    assert settings_text(settings, log=None) == f'peer = "{PEER}"\ngrace_s = 7\n'
    text = f'peer = "{PEER}"\ngrace_s = 61\n'
    with pytest.raises(ConfigError, match="line 2, field 'grace_s': got 61, expected a whole number from 1 to 60"):
        check_settings({"peer": PEER, "grace_s": 61}, "counter", path, text)
    with pytest.raises(ConfigError, match="'grace': unknown field: did you mean 'grace_s'"):
        check_settings({"peer": PEER, "grace": 61}, "counter", path, text)
    registered: Any = Registry(tmp_path).register("counter", PEER, grace_s=9)
    assert (registered.grace_s, path.read_text()) == (9, f'peer = "{PEER}"\ngrace_s = 9\n')
    given: dict[str, Any] = {}
    command = click.command()(register_options(lambda **options: given.update(options)))
    assert CliRunner().invoke(command, ["--peer", PEER, "--grace-s", "8"]).exit_code == 0
    assert (given["grace_s"], given["keep_log_days"]) == (8, None)
    refused = CliRunner().invoke(command, ["--peer", PEER, "--grace-s", "0"])
    assert (refused.exit_code, "0 is not in the range 1<=x<=60" in refused.output) == (2, True)
    shown = CliRunner().invoke(command, ["--help"]).output
    assert "How long it waits before it gives up." in shown
    assert "[default: 5]" in shown
    row = "| `grace_s` | a whole number from 1 to 60 (seconds) | 5 | How long it waits before it gives up. |\n"
    assert row in CliRunner().invoke(settings_command.settings).output


def test_the_page_of_the_site_has_the_table_of_the_schema() -> None:
    table = CliRunner().invoke(main, ["settings"]).output
    assert table.count("\n") > len(settings_of(InstanceSettings))
    assert table in with_tables(PAGE.read_text()), "docs/reference/settings.md: the marker of the table is not there"


def test_msgspec_takes_the_schema_as_it_is() -> None:
    described = inspect.type_info(InstanceSettings)
    assert isinstance(described, inspect.StructType)
    assert {field.name for field in described.fields} >= set(settings_of(InstanceSettings))


@pytest.mark.parametrize("setting", list(all_settings()), ids=lambda setting: setting.name)
def test_what_is_said_of_a_setting_fits(setting: Setting) -> None:
    assert setting.text.endswith(".")
    assert setting.is_table or setting.expected
    if setting.default is not NODEFAULT and setting.is_single:
        in_file = setting.in_file(setting.default)
        assert in_file is None or setting.value_of(in_file) == setting.default


def test_an_option_says_only_what_was_given(tmp_path: Path) -> None:
    arguments = ["--home", str(tmp_path), "register"]
    assert CliRunner().invoke(main, [*arguments, "a", "--peer", PEER]).exit_code == 0
    assert (tmp_path / "a.toml").read_text() == f'peer = "{PEER}"\nlog_key = "file"\n'
    options = ["--kills-before-verdict", "never", "--insecure", "--app", "shop:Stock", "--log-key"]
    assert CliRunner().invoke(main, [*arguments, "b", "--peer", "tcp://127.0.0.1:7003", *options]).exit_code == 0
    settings = Registry(tmp_path).load("b")
    assert (settings.kills_before_verdict, settings.insecure, settings.app) == (None, True, "shop:Stock")
    assert (settings.log_key, settings.keep_checkpoints) == ("file", 2)


def test_paths_of_options_are_those_of_the_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    arguments = ["--home", str(tmp_path / "home"), "register", "a", "--peer", PEER, "--metrics-token-file", "token"]
    assert CliRunner().invoke(main, [*arguments, "--log", "log", "--log-key", "key"]).exit_code == 0
    settings = Registry(tmp_path / "home").load("a")
    assert settings.metrics_token_file == tmp_path / "here" / "token"
    assert (settings.log, settings.log_key) == (str(tmp_path / "here" / "log"), str(tmp_path / "here" / "key"))
    (tmp_path / "here" / "file").write_text("x")
    refused = CliRunner().invoke(main, [*arguments[:3], "b", "--peer", "tcp://127.0.0.1:*", "--log", "file"])
    assert (refused.exit_code, "is a file, expected a folder" in refused.output) == (2, True)


def test_a_running_coordinator_loads_neither_register_nor_the_table() -> None:
    program = "import sys, immortal.__main__, immortal.coordinator.service.runtime; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "immortal.coordinator.service.runtime" in loaded
    assert not {"immortal.cli.registration", "tomlkit"} & set(loaded)


def test_tables_of_lists_are_overridden_and_written_as_they_were_read(tmp_path: Path) -> None:
    """A coordinator that is started with an option reads its settings once more, from their values."""
    key = "<v#Xvb(^@D]nWLX^no5Q4jXCPwD5:d<[pGl84$aZ"
    path = tmp_path / "a.toml"
    path.write_text(
        "peer = 'tcp://127.0.0.1:1'\n"
        "[peers]\nb = 'tcp://127.0.0.1:2'\n"
        f"[peer_keys]\nb = '{key}'\n[client_keys]\nweb = ['{key}', '{key[::-1]}']\n"
        "[allow]\nb = '*'\nweb = ['place', '@query']\n[tuning]\ngroup_size_kib_max = 64\n"
    )
    settings = read_settings(path, "a")
    assert settings.client_keys["web"] == (key, key[::-1])
    assert override(settings, insecure=True) == structs.replace(settings, insecure=True)
    path.write_text(settings_text(settings, log=None))
    assert read_settings(path, "a") == settings
