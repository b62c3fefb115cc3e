"""`immortal systemd`: systemd itself says that the files are right, and what they start is a service of the project."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.projects import immortal, make_project

NASTY = """
name = "corner-shop"
[services.till]
app = "shop:Till"
[services.shop]
app = "shop:Shop"
environment = { GREETING = 'a "b" $HOME 100% \\ c' }
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "a shop, 100%"
    folder.mkdir()
    make_project(folder, project=NASTY)
    return folder


def test_they_are_printed_or_written(folder: Path) -> None:
    printed = immortal(folder, "systemd")
    assert "# immortal-corner-shop-till.service" in printed
    assert (folder / ".immortal" / "till.toml").exists()
    immortal(folder, "systemd", "--output", "units", "--user")
    names = ["immortal-corner-shop-shop.service", "immortal-corner-shop-till.service", "immortal-corner-shop.target"]
    assert sorted(file.name for file in (folder / "units").iterdir()) == names
    text = (folder / "units" / names[0]).read_text()
    assert "User=" not in text
    assert "WantedBy=immortal-corner-shop.target" in text
    assert 'Environment="GREETING=a \\"b\\" $HOME 100%% \\\\ c"' in text
    assert "WorkingDirectory=" + str(folder).replace("%", "%%") in text


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze here")
@pytest.mark.parametrize("of", ["--system", "--user"])
def test_systemd_takes_them(folder: Path, tmp_path: Path, of: str) -> None:
    immortal(folder, "systemd", "--output", "../units", *(["--user"] if of == "--user" else []))
    files = sorted(map(str, (tmp_path / "units").iterdir()))
    environment = {**os.environ, "SYSTEMD_LOG_LEVEL": "warning", "XDG_RUNTIME_DIR": str(tmp_path)}
    argv = ["systemd-analyze", "verify", "--man=no", of, *files]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, env=environment)
    own = [line for line in done.stderr.splitlines() if "immortal-" in line]
    assert (done.returncode, own) == (0, []), done.stderr
    (tmp_path / "units" / "immortal-corner-shop-till.service").write_text("[Service]\nKillMode=gently\n")
    broken = subprocess.run(argv, capture_output=True, text=True, timeout=60, env=environment)
    assert "immortal-corner-shop-till.service" in broken.stderr  # it does look


def test_what_they_start_is_the_service(folder: Path) -> None:
    immortal(folder, "systemd", "--output", "units")
    lines = (folder / "units" / "immortal-corner-shop-till.service").read_text().splitlines()
    (start,) = (line.removeprefix("ExecStart=") for line in lines if line.startswith("ExecStart="))
    argv = shlex.split(start.replace("%%", "%").replace("$$", "$"))
    assert argv[-3:] == ["run", "till", "--restart"], "an upgrade changes the class in the registry, not here"
    assert argv[0] == sys.executable
    with subprocess.Popen(argv, cwd=folder, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as run:
        assert run.stderr is not None
        assert any(line.rstrip().endswith("till  ready") for line in run.stderr)
        run.send_signal(signal.SIGTERM)
        run.stderr.read()
    assert run.returncode == 0
