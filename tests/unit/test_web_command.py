"""`immortal web` where it can't be served."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from immortal.cli import main


def test_without_its_packages_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "starlette", None)
    result = CliRunner().invoke(main, ["--home", str(tmp_path), "web"])
    assert result.exit_code == 1
    assert "install 'immortal-services[web]'" in result.stderr


@pytest.mark.parametrize("host", ["192.0.2.1", "example.org", "::"])
def test_another_address_than_loopback_needs_more(tmp_path: Path, host: str) -> None:
    result = CliRunner().invoke(main, ["--home", str(tmp_path), "web", "--host", host])
    assert result.exit_code == 2
    assert "--token-file" in result.stderr
