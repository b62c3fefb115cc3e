"""Files in the user's folder that have names of Python's modules, or of ours."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.cli import HOME, Run, immortal

SERVICE = """
from immortal import Immortal, on_primary
{imports}

class Service(Immortal):
    @on_primary
    def say(self, impulses) -> None:
        print("it runs:", {value})  # seen while it runs
"""
Start = Callable[..., Run]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    immortal(tmp_path, "register", "service", "--peer", "tcp://127.0.0.1:*")
    return tmp_path


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """`immortal run`, which is a program of its own: it does not look for modules in the current folder."""
    runs: list[Run] = []

    def begin(*arguments: str) -> Run:
        runs.append(Run(folder, "service", *arguments, python=(sys.executable, "-P")))
        return runs[-1]

    yield begin
    for run in runs:
        run.kill()


def write_service(folder: Path, imports: str = "", value: str = "None") -> None:
    (folder / "service.py").write_text(SERVICE.format(imports=imports, value=value))


def write_strange_names(folder: Path) -> None:
    for name in ("protocol.py", "select.py", "msgspec.py", "queue.py"):
        (folder / name).write_text(f"answer = {name!r}\n")
    (folder / "coordinator").mkdir()
    (folder / "coordinator" / "__init__.py").write_text("answer = 'coordinator'\n")


def test_they_are_in_nobodys_way(folder: Path, start: Start) -> None:
    write_strange_names(folder)
    write_service(folder)
    run = start("service:Service")
    assert run.line("it runs") == "it runs: None"
    assert run.stop() == 0
    assert run.count("warning") == 0
    output = subprocess.run(
        [sys.executable, "-P", "-m", "immortal", "--home", HOME, "verify", "service"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert output.returncode == 0, output


def test_who_imports_one_is_told_what_it_gets(folder: Path, start: Start) -> None:
    write_strange_names(folder)
    write_service(folder, "import helper, coordinator", "(helper.got(), coordinator.answer)")
    (folder / "helper.py").write_text("def got():\n    import select, msgspec\n    return hasattr(select, 'answer')\n")
    run = start("service:Service")
    assert run.line("it runs") == "it runs: (False, 'coordinator')"  # the user's own, as the app needs no other
    line = run.line("'import select'")
    assert line == (
        f"app service:Service: warning: {folder}/helper.py: 'import select' gives Python's own module of that name, "
        f"not {folder}/select.py: give that file another name"
    )
    assert "gives the module that Immortal uses of that name" in run.line("'import msgspec'")
    assert run.count("warning") == 2


def test_the_users_come_before_installed_ones(folder: Path, start: Start) -> None:
    (folder / "pytest.py").write_text("answer = 'mine'\n")
    write_service(folder, "import pytest", "pytest.answer")
    assert start("service:Service").line("it runs") == "it runs: mine"


def test_an_import_that_fails_for_it_says_so(folder: Path, start: Start) -> None:
    write_strange_names(folder)
    write_service(folder, "from select import answer", "answer")
    run = start("service:Service")
    assert run.ended() == 1
    assert f"gives Python's own module of that name, not {folder}/select.py" in run.line("'import select'")
    assert "Traceback" in run.text


def test_the_apps_own_module_may_not_have_such_a_name(folder: Path, start: Start) -> None:
    write_strange_names(folder)
    write_service(folder)
    (folder / "service.py").rename(folder / "select.py")
    run = start("select:Service")
    assert run.ended() == 1
    assert run.line("app select:Service") == (
        f"app select:Service: 'select:Service': 'import select' gives Python's own module of that name, not "
        f"{folder}/select.py: give that file another name"
    )
