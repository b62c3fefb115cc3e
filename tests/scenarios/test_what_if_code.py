"""Both sides of `immortal what-if` run the code that they name, and say which it was."""

from __future__ import annotations

import contextlib
import json
import os
import py_compile
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from immortal.cli import main
from immortal.replay.plan import ReplayError
from immortal.web.orders import Order, run_what_if_order
from immortal.web.rendering import render
from tests.helpers.flow import STATUSES, app_of, record_flow, source_of, write_code


@pytest.fixture(scope="module")
def flow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flow")
    record_flow(folder)
    return folder


def what_if(flow: Path, name: str, *arguments: object, status: int, cwd: Path | None = None) -> Result:
    with contextlib.chdir(cwd or flow / "old"):
        result = CliRunner().invoke(main, ["--home", str(flow / "home"), "what-if", name, *map(str, arguments)])
    assert result.exit_code == status, (result.output, result.exception)
    return result


def values(flow: Path, name: str, *arguments: object, status: int, cwd: Path | None = None) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(what_if(flow, name, *arguments, "--json", status=status, cwd=cwd).stdout)
    return found


def test_each_change_is_found_and_both_codes_are_named(flow: Path) -> None:
    """Of equal and of other module names."""
    for name, status in STATUSES.items():
        found = values(flow, name, "--app", app_of(name), "--code", "../new", status=status)
        assert [found[f"{side}_code"]["file"] for side in ("old", "new")] == [
            str(flow / side / "flow" / f"{name}.py") for side in ("old", "new")
        ]
        assert found["differences"]["changed"] == (5 if name in ("calls", "both") else 0)
        assert bool(found["state"]) == (name in ("state", "both"))
        assert found["old_code"]["digest"] != found["new_code"]["digest"]  # flow/__init__ imports flow.state, changed
        assert found["old_code"]["modules"] == (2 if name == "state" else 3)
    lines = what_if(flow, "state", "--app", app_of("state", "flow2"), "--code", "../new", status=3).stdout.splitlines()
    assert any(line.startswith(f"old code: {flow}/old/flow/state.py, 2 modules with digest ") for line in lines)
    assert any(line.startswith(f"new code: {flow}/new/flow2/state.py, 2 modules with digest ") for line in lines)
    assert "  total: was 15; would be 30" in lines


def test_equal_code_has_an_equal_digest_wherever_it_is(flow: Path, tmp_path: Path) -> None:
    write_code(tmp_path / "copy", "flow")
    found = values(flow, "state", "--app", app_of("state"), "--code", tmp_path / "copy", status=0)
    assert found["old_code"]["digest"] == found["new_code"]["digest"]
    assert "both sides ran the same code" in found["notes"]
    (tmp_path / "copy" / "flow" / "__init__.py").write_text("from flow import state  # another\n")
    found = values(flow, "state", "--app", app_of("state"), "--code", tmp_path / "copy", status=0)
    assert found["old_code"]["digest"] != found["new_code"]["digest"]
    assert found["notes"] == []


def test_code_is_never_compared_with_itself(flow: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for cwd, code in ((flow / "new", "."), (flow / "new", "../new"), (flow / "home", flow / "new")):
        if cwd.name == "home":
            monkeypatch.setenv("PYTHONPATH", str(flow / "new"))
        for name in ("state", "calls")[: 2 if code == "." else 1]:
            said = what_if(flow, name, "--app", app_of(name), "--code", code, status=1, cwd=cwd).stderr
            assert f"the old code is {flow}/new/flow/{name}.py as well, so the new code would be compared with" in said
    link = tmp_path / "current"
    link.symlink_to(flow / "new")
    monkeypatch.delenv("PYTHONPATH")
    said = what_if(flow, "state", "--app", app_of("state"), "--code", link, status=1, cwd=flow / "new").stderr
    assert "would be compared with itself" in said


def test_code_that_is_not_there_is_not_passed_over(flow: Path, tmp_path: Path) -> None:
    """The class would come from the folder of the old code."""
    said = what_if(flow, "state", "--app", app_of("state"), "--code", tmp_path, status=1).stderr
    assert f"nothing of it is in {tmp_path}: its module is {flow}/old/flow/state.py" in said
    said = what_if(flow, "state", "--app", "-", "--code", "../new", status=1).stderr
    assert "is for an app that this command starts" in said


def test_a_path_of_the_environment_does_not_come_first(flow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(flow / "old"))
    monkeypatch.setenv("IMMORTAL_CODE", str(flow / "new"))  # meant for nobody here
    assert values(flow, "state", "--app", app_of("state"), "--code", "../new", status=3, cwd=flow / "home")["state"]


@pytest.mark.parametrize("place", ["folder", "old.whl"])
def test_stale_bytecode_is_not_run(flow: Path, tmp_path: Path, place: str) -> None:
    """Of a source with the same size, changed within the same second: Python itself would believe it."""
    code = tmp_path / "new"
    write_code(code, "flow")
    module = code / "flow" / "state.py"
    cached = Path(py_compile.compile(str(module), doraise=True))
    before = module.stat()
    module.write_text(source_of("state").replace("self.total += number", "self.total -= number"))
    assert module.stat().st_size == before.st_size
    os.utime(module, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert cached.exists()
    if place != "folder":
        with zipfile.ZipFile(tmp_path / place, "w") as wheel:
            for path in sorted((code / "flow").glob("*.py")):
                wheel.write(path, f"flow/{path.name}")
            wheel.write(cached, "flow/state.pyc")
        code = tmp_path / place
    found = values(flow, "state", "--app", app_of("state"), "--code", code, status=3)
    assert found["state"] == [{"path": "total", "old": 15, "new": -15}]
    if place == "folder":  # the old code, and a verification, are no exception
        said = what_if(flow, "state", "--app", app_of("state", "flow2"), "--code", flow / "new", status=3, cwd=code)
        assert "  total: was -15; would be 30" in said.stdout.splitlines()
        with contextlib.chdir(code):
            verified = CliRunner().invoke(main, ["--home", str(flow / "home"), "verify", "state", "--json"])
        assert json.loads(verified.stdout)["sections"][-1]["code"] == found["new_code"]


def test_an_editable_install_does_not_come_first(flow: Path, tmp_path: Path) -> None:
    """With a finder of its own, before all others, as some build tools make it."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import sys\nfrom importlib.machinery import PathFinder\n\n\n"
        "class Editable:\n    @staticmethod\n    def find_spec(name, path=None, target=None):\n"
        f"        return PathFinder.find_spec(name, [{str(flow / 'old')!r}]) if name == 'flow' else None\n\n\n"
        "sys.meta_path.insert(0, Editable)\n"
    )
    options = ["--app", app_of("state"), "--code", str(flow / "new"), "--json"]
    command = [sys.executable, "-m", "immortal", "--home", str(flow / "home"), "what-if", "state", *options]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=flow / "home", check=False)
    assert done.returncode == 3, done.stderr
    found = json.loads(done.stdout)
    assert found["state"] == [{"path": "total", "old": 15, "new": 30}]
    assert found["old_code"]["file"] == str(flow / "old" / "flow" / "state.py")


def test_names_of_python_are_its_own_in_both_codes(flow: Path, tmp_path: Path) -> None:
    code = tmp_path / "new"
    shutil.copytree(flow / "new", code)
    (code / "random.py").write_text("raise SystemExit('this is not what random is')\n")
    assert values(flow, "state", "--app", app_of("state"), "--code", code, status=3)["state"]
    (code / "queue.py").write_text(source_of("state", new=True))
    said = what_if(flow, "state", "--app", "queue:State", "--code", code, status=1).stderr
    assert "'import queue' gives Python's own module of that name" in said


def test_packages_without_an_init_are_taken_from_the_code_first(flow: Path, tmp_path: Path) -> None:
    for side in ("old", "new"):
        shutil.copytree(flow / side, tmp_path / side)
        (tmp_path / side / "flow" / "__init__.py").unlink()
    options = ("--app", app_of("state"), "--code", "../new")
    found = values(flow, "state", *options, status=3, cwd=tmp_path / "old")
    assert [found[f"{side}_code"]["file"] for side in ("old", "new")] == [
        str(tmp_path / side / "flow" / "state.py") for side in ("old", "new")
    ]


def test_the_page_runs_the_code_that_is_named(flow: Path) -> None:
    order = Order(str(flow / "home"), "both", app_of("both"), code=str(flow / "new"))
    with contextlib.chdir(flow / "old"):
        report = run_what_if_order(order, lambda done, total: None)
    assert report["state"] == [{"path": "total", "old": 15, "new": 30}]
    assert report["new_code"]["file"] == str(flow / "new" / "flow" / "both.py")
    shown = _shown(report)
    for side in ("old", "new"):
        assert f"{report[f'{side}_code']['digest'][:16]}</span>" in shown
    assert "Not worked out: what store would do with 5 other calls, and send back" in shown
    _shown({key: value for key, value in report.items() if "_code" not in key and "worked" not in key})  # a kept one
    with contextlib.chdir(flow / "new"), pytest.raises(ReplayError, match="would be compared with itself"):
        run_what_if_order(order, lambda done, total: None)


def _shown(report: dict[str, Any]) -> str:
    return render("_what_if.html", site=None, name="both", job=SimpleNamespace(state="done", report=report))
