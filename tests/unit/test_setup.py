"""scripts/setup: what it installs, where from, and what it only says. Python, apt-get and sudo are made up here."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from immortal.protocol import distribution

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "requirements-dev.lock"
COMPILER = " ".join(tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"])
lock_lines = runpy.run_path(str(ROOT / "scripts" / "write_lock.py"))["lock_lines"]

PYTHON = """#!/bin/sh
echo "python $*" >>"$CALLS"
case "$*" in
*version_info*ensurepip* | *'import ensurepip, venv'*) [ -e "$PLACE/venv-package" ] ;;
*'python%d.%d-venv'*) echo python3.11-venv ;;
*enable-optimizations*) [ ! -e "$PLACE/slow-${0##*/}" ] ;;
*implementation*) echo "# for cpython 3.11 on linux x86_64" ;;
*sys.prefix*) echo "$PLACE/.venv" ;;
'-m venv .venv') mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
*'import compiled'*)
    [ -e "$PLACE/pure" ] && is='pure Python' || is=compiled
    echo "1234 $is codec and core" ;;
'setup.py -q build_ext --inplace') rm "$PLACE/pure" ;;
*immortal.pipeline.java*) [ -e "$PLACE/java" ] || { echo 'error: Spark needs Java 17'; exit 1; } ;;
*--require-hashes*) [ -z "${PIP_SAYS:-}" ] || { echo "ERROR: $PIP_SAYS"; exit 1; } ;;
esac
"""
APT_GET = """#!/bin/sh
echo "apt-get $*" >>"$CALLS"
case "$*" in
*-venv) : >"$PLACE/venv-package" ;;
*jre*) : >"$PLACE/java" ;;
esac
"""


class Machine:
    """A made-up machine: without venv and Java unless they are given, with root or not, with sudo or not."""

    def __init__(self, folder: Path, *, root: bool, sudo: bool, has: tuple[str, ...]) -> None:
        self.folder = folder
        self._calls = folder / "calls"
        programs = folder / "programs"
        for made in (programs, folder / "scripts"):
            made.mkdir(parents=True)
        shutil.copy(ROOT / "scripts" / "setup", folder / "scripts")
        for made in (self._calls, folder / "pyproject.toml"):
            made.touch()
        for name in has:
            (folder / name).touch()
        says = {"python3": PYTHON, "apt-get": APT_GET, "id": f"#!/bin/sh\necho {0 if root else 1000}\n"}
        names = [*(f"python3.{minor}" for minor in (11, 12, 13, 14)), "chromium", "prometheus"]
        says |= dict.fromkeys(names, "#!/bin/sh\nexit 1\n")
        says["sudo"] = '#!/bin/sh\necho "sudo $*" >>"$CALLS"\n[ "$2" = true ] || { shift; exec "$@"; }\n'
        if not sudo:
            says["sudo"] = "#!/bin/sh\nexit 1\n"
        for name, text in says.items():
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        self._environment = {"PATH": f"{programs}:/usr/bin:/bin", "CALLS": str(self._calls), "PLACE": str(folder)}
        self._environment["SYSTEM_PYTHON"] = str(programs / "absent")

    def setup(self, *arguments: str, status: int = 0, **environment: str) -> str:
        done = subprocess.run(
            [self.folder / "scripts" / "setup", *arguments],
            env={**self._environment, **environment},
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.returncode == status, done.stderr
        assert not done.stdout
        return done.stderr

    def called(self, program: str) -> list[str]:
        return [
            line.partition(" ")[2] for line in self._calls.read_text().splitlines() if line.startswith(f"{program} ")
        ]

    def pip_installs(self) -> list[str]:
        return [line.partition("--no-input ")[2] for line in self.called("python") if "-m pip install" in line]


@pytest.fixture
def made(tmp_path: Path) -> Any:
    def make(*has: str, root: bool = True, sudo: bool = False) -> Machine:
        return Machine(Path(os.path.realpath(tmp_path)) / "project", root=root, sudo=sudo, has=has)

    return make


# --- Debian packages --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("root", [True, False])
def test_without_system_nothing_is_installed_and_it_is_said_what_to_type(made: Any, root: bool) -> None:
    machine = made(root=root, sudo=True)
    said = machine.setup(status=1)
    assert said == (
        "setup: python3 cannot make environments; on Debian, as root: apt-get install python3.11-venv (or"
        " python3-venv), which 'scripts/setup --system' does\n"
    )
    assert machine.called("apt-get") == machine.called("sudo") == []
    assert machine.pip_installs() == []


@pytest.mark.parametrize(
    ("root", "by"),
    [(True, "apt-get"), (False, "sudo -n env DEBIAN_FRONTEND=noninteractive apt-get")],
)
def test_with_system_it_says_what_it_installs_and_does(made: Any, root: bool, by: str) -> None:
    machine = made(root=root, sudo=True)
    said = machine.setup("--system")
    assert said.splitlines() == [
        f"setup: installs the Debian package python3.11-venv ({by})",
        "setup: compiled codec and core",
    ]
    assert machine.called("apt-get") == ["install -y python3.11-venv"]
    assert bool(machine.called("sudo")) is not root
    assert machine.pip_installs() == [COMPILER, "--no-build-isolation -e ."]


def test_who_may_not_install_is_told_what_to_type(made: Any) -> None:
    machine = made(root=False, sudo=False)
    said = machine.setup("--system", status=1)
    assert said == (
        "setup: python3 cannot make environments; on Debian, as root: apt-get install python3.11-venv (or"
        " python3-venv)\n"
    )
    assert machine.called("apt-get") == []


def test_a_machine_that_has_all_is_left_alone(made: Any) -> None:
    machine = made("venv-package", "java", root=True)
    assert machine.setup("--system", "dev") == "setup: compiled codec and core\n"
    assert machine.called("apt-get") == []
    before = len(machine.called("python"))
    assert machine.setup("--system", "dev") == ""
    assert len(machine.called("python")) <= before + 3, "it was done already"


@pytest.mark.parametrize(
    ("slow", "chosen"), [((), "python3"), (("python3",), "absent"), (("python3", "absent"), "python3")]
)
def test_a_python_built_with_its_optimisations_is_preferred(made: Any, slow: tuple[str, ...], chosen: str) -> None:
    machine = made("venv-package", *(f"slow-{name}" for name in slow))
    system = machine.folder / "programs" / "absent"
    system.write_text(PYTHON.replace('"python $*"', '"absent $*"'))
    system.chmod(0o755)
    machine.setup()
    assert "-m venv .venv" in machine.called("python" if chosen == "python3" else chosen)


@pytest.mark.parametrize(("kind", "extras"), [("docs", "[docs]"), ("bench", "[rivals]")])
def test_what_dev_has_not_is_installed_beside_it(made: Any, kind: str, extras: str) -> None:
    machine = made("venv-package", "java", root=True)
    machine.setup("dev")
    machine.setup("plain")
    before = len(machine.pip_installs())
    machine.setup(kind)
    assert machine.pip_installs()[before:] == [COMPILER, f"--no-build-isolation -e .{extras}"]


def test_java_is_installed_with_system_only(made: Any) -> None:
    machine = made("venv-package", root=True)
    assert machine.setup("spark", status=1) == "setup: compiled codec and core\nsetup: Spark needs Java 17\n"
    assert machine.setup("dev").endswith("setup: Spark needs Java 17 (the tests that need Spark are skipped)\n")
    assert machine.called("apt-get") == []
    assert machine.setup("--system", "dev") == "setup: installs the Debian package openjdk-17-jre-headless (apt-get)\n"
    assert machine.called("apt-get") == ["install -y openjdk-17-jre-headless"]


@pytest.mark.parametrize("arguments", [["--sistem"], ["all"], ["--system", "all"]])
def test_an_unknown_word_is_refused(made: Any, arguments: list[str]) -> None:
    assert "unknown kind" in made("venv-package").setup(*arguments, status=1)


@pytest.mark.parametrize("name", ["demo", "test", "soak"])
def test_what_the_readme_says_to_type_does_all_of_it(name: str) -> None:
    assert re.search(r'scripts/setup"? --system', (ROOT / "scripts" / name).read_text())


# --- compiling --------------------------------------------------------------------------------------------------------

COMPILE = "setup.py -q build_ext --inplace"


def test_who_only_runs_it_does_not_wait_for_the_compiler(made: Any) -> None:
    machine = made("venv-package", "pure")
    said = machine.setup()
    assert said == "setup: the codec and the core are compiled in the background; until then they run in Python\n"
    log = machine.folder / ".venv" / "compile.log"
    deadline_s = time.monotonic() + 30
    while "setup: compiled codec and core\n" not in log.read_text():
        assert time.monotonic() < deadline_s, log.read_text()
        time.sleep(0.01)
    assert machine.setup() == ""
    assert machine.called("python").count(COMPILE) == 1


@pytest.mark.parametrize("arguments", [["dev"], ["compile"]])
def test_who_tests_it_waits(made: Any, arguments: list[str]) -> None:
    machine = made("venv-package", "java")
    machine.setup()
    machine.folder.joinpath("pure").touch()
    machine.folder.joinpath(".venv", ".setup-codec").unlink()
    assert machine.setup(*arguments) == "setup: compiled codec and core\n"
    assert machine.called("python").count(COMPILE) == 1


def test_what_is_being_compiled_is_not_compiled_twice(made: Any) -> None:
    machine = made("venv-package")
    machine.setup()
    machine.folder.joinpath("pure").touch()
    machine.folder.joinpath(".venv", ".setup-codec").unlink()
    machine.folder.joinpath(".venv", ".compiling").write_text(str(os.getpid()))
    assert machine.setup() == ""
    assert COMPILE not in machine.called("python")


# --- the lock ---------------------------------------------------------------------------------------------------------


def locked(machine: Machine, for_which: str = "cpython 3.11 on linux x86_64") -> Machine:
    machine.folder.joinpath(LOCK.name).write_text(
        f"# for {for_which}\na==1 --hash=sha256:00\nsetuptools==80 --hash=sha256:01\n"
    )
    return machine


def test_dev_takes_what_the_lock_has_and_nothing_else(made: Any) -> None:
    machine = locked(made("venv-package", "java"))
    machine.setup("dev")
    assert machine.pip_installs() == [
        "--require-hashes -r .venv/build.lock",
        "--no-build-isolation --require-hashes -r requirements-dev.lock",
        "--no-build-isolation -e .[dev]",
    ]
    assert machine.folder.joinpath(".venv/build.lock").read_text() == "setuptools==80 --hash=sha256:01\n"


def test_on_another_python_it_takes_the_newest_and_says_so(made: Any) -> None:
    machine = locked(made("venv-package", "java"), "cpython 3.13 on linux x86_64")
    assert machine.setup("dev").splitlines()[0] == (
        "setup: requirements-dev.lock is for cpython 3.13 on linux x86_64, this is cpython 3.11 on linux x86_64:"
        " takes the newest that pyproject.toml allows"
    )
    assert machine.pip_installs() == [COMPILER, "--no-build-isolation -e .[dev]"]


def test_where_a_version_is_not_to_be_had_it_takes_the_newest_and_says_so(made: Any) -> None:
    machine = locked(made("venv-package", "java"))
    said = machine.setup("dev", PIP_SAYS="No matching distribution found for a==1")
    assert said.splitlines()[0] == (
        "setup: not all of requirements-dev.lock is to be had here (ERROR: No matching distribution found for a==1):"
        " takes the newest that pyproject.toml allows"
    )
    assert machine.pip_installs()[-2:] == [COMPILER, "--no-build-isolation -e .[dev]"]


def test_a_package_that_was_changed_is_not_installed(made: Any) -> None:
    machine = locked(made("venv-package", "java"))
    said = machine.setup("dev", status=1, PIP_SAYS="THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.")
    assert said.endswith(
        "a package is another one than requirements-dev.lock says: find out why, before it is installed\n"
    )
    assert machine.pip_installs() == ["--require-hashes -r .venv/build.lock"]


def test_a_changed_lock_is_installed_anew(made: Any) -> None:
    machine = locked(made("venv-package", "java"))
    machine.setup("dev")
    machine.folder.joinpath(LOCK.name).open("a").write("b==2 --hash=sha256:02\n")
    machine.setup("dev")
    assert len(machine.pip_installs()) == 6


def test_the_lock_is_written_without_a_place() -> None:
    project = {"url": "file:///home/me/immortal", "dir_info": {}}
    file = {"url": "https://user:secret@mirror/one.whl", "archive_info": {"hashes": {"sha256": "ab"}}}
    report: dict[str, Any] = {
        "environment": {
            "implementation_name": "cpython",
            "python_version": "3.11",
            "sys_platform": "linux",
            "platform_machine": "x86_64",
        },
        "install": [
            {"download_info": project, "metadata": {"name": "immortal-services", "version": "1"}},
            {"download_info": file, "metadata": {"name": "Zope.Interface", "version": "1.0"}},
            {"download_info": dict(file), "metadata": {"name": "a_b", "version": "1.0"}},
        ],
    }
    assert list(lock_lines(report))[2:] == ["a-b==1.0 --hash=sha256:ab", "zope-interface==1.0 --hash=sha256:ab"]
    del file["archive_info"]
    with pytest.raises(ValueError, match=r"zope-interface 1\.0 has no sha256"):
        list(lock_lines(report))


def requirements(extra: str, optional: dict[str, list[str]]) -> set[Requirement]:
    """Of an extra of ours, with those of the extras that it names."""
    found = set()
    for line in optional[extra]:
        one = Requirement(line)
        if one.name == distribution.NAME:
            found |= {each for named in one.extras for each in requirements(named, optional)}
        else:
            found.add(one)
    return found


def test_the_lock_fits_pyproject() -> None:
    first, *lines = LOCK.read_text().splitlines()
    assert re.fullmatch(r"# for cpython 3\.\d+ on linux \w+", first)
    pinned = {}
    for line in lines[1:]:
        match = re.fullmatch(r"([a-z0-9-]+)==(\S+) --hash=sha256:[0-9a-f]{64}", line)
        assert match, line
        pinned[match[1]] = match[2]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = requirements("dev", project["optional-dependencies"]) | set(map(Requirement, project["dependencies"]))
    for one in wanted:
        assert pinned.get(canonicalize_name(one.name), "none") in one.specifier, f"{one}: run scripts/lock"
    assert {"setuptools", "cython"} <= pinned.keys(), "what builds the others"
