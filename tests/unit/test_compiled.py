"""The compiled codec and core: found for their very sources, left out otherwise, and no need of them to install."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from immortal.protocol import compiled

ROOT = Path(__file__).parents[2]
SHOW = """
import importlib
import immortal.coordinator.core
from immortal.protocol import compiled
print(compiled.describe())
for one in compiled.SETS:
    for name in one.paths():
        print(importlib.import_module(name).__file__)
"""
PATHS = {module: path for one in compiled.SETS for module, path in one.paths().items()}
needs_compiled = pytest.mark.skipif(
    not all(path.exists() for path in PATHS.values()), reason="nothing is compiled here"
)
CHANGED = [
    *compiled.CODEC.sources(),
    *map(Path("immortal/coordinator").joinpath, ("core/machine.py", "core/effects.py", "driver/turn.py")),
    Path("immortal/protocol/limits.py"),
]


def run(*command: str, root: Path = ROOT, **environment: str) -> list[str]:
    inherited = {key: value for key, value in os.environ.items() if key != compiled.PURE_VARIABLE}
    result = subprocess.run(
        [sys.executable, *command],
        env={**inherited, "PYTHONPATH": str(root), **environment},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    return (result.stdout + result.stderr).splitlines()


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    ignored = shutil.ignore_patterns("__pycache__", "_compiled", "pipeline", "bench", "replay")
    shutil.copytree(ROOT / "immortal", tmp_path / "immortal", ignore=ignored)
    return tmp_path


@pytest.fixture
def with_compiled(copied: Path) -> Path:
    for one in compiled.SETS:
        shutil.copytree(ROOT / one.folder, copied / one.folder)
    return copied


@needs_compiled
def test_what_is_compiled_of_this_source_runs() -> None:
    first, *files = run("-c", SHOW)
    assert first == "compiled codec and core"
    folders = [Path(file).relative_to(ROOT).parts[:3] for file in files]
    assert folders == [one.folder.parts for one in compiled.SETS for _ in one.paths()]


@needs_compiled
@pytest.mark.parametrize(
    "module", ["immortal.appsdk.calls.context", "immortal.coordinator.log.rows", "immortal.coordinator.driver.turn"]
)
def test_a_compiled_module_is_found_by_who_imports_it_first(module: str) -> None:
    (file,) = run("-c", f"import importlib; print(importlib.import_module({module!r}).__file__)")
    assert Path(file).name == PATHS[module].name


def test_pure_python_can_be_asked_for() -> None:
    first, *files = run(
        "-c", "from immortal.protocol import compiled; print(compiled.describe())", IMMORTAL_PURE_PYTHON="1"
    )
    assert first == "pure Python codec and core (IMMORTAL_PURE_PYTHON is set)"
    program = (
        "from immortal.coordinator.core import machine\n"
        "from immortal.protocol import batch\n"
        "print(machine.__file__, batch.__file__)"
    )
    (files,) = run("-c", program, IMMORTAL_PURE_PYTHON="1")
    assert files == f"{ROOT / 'immortal/coordinator/core/machine.py'} {ROOT / 'immortal/protocol/batch.py'}"


@needs_compiled
def test_a_changed_source_is_never_hidden_by_what_was_compiled_before(with_compiled: Path) -> None:
    program = "import immortal.coordinator.core; from immortal.protocol import compiled; print(compiled.describe())"
    assert run("-c", program, root=with_compiled) == ["compiled codec and core"]
    codec, core = "pure Python codec", "pure Python core"
    why = "(the compiled one is of another source)"
    for changed in CHANGED:
        text = (with_compiled / changed).read_text()
        (with_compiled / changed).write_text(f"{text}# one more line\n")
        (said,) = run("-c", program, root=with_compiled)
        of_codec, of_core = (changed in one.sources() for one in compiled.SETS)
        assert (changed, said) == (
            changed,
            {
                (True, False): f"{codec} {why}, compiled core",
                (False, True): f"compiled codec, {core} {why}",
                (True, True): f"{codec} and core {why}",
            }[of_codec, of_core],
        )
        (with_compiled / changed).write_text(text)


@needs_compiled
def test_a_stamp_stands_for_the_sources_until_one_changes(with_compiled: Path, tmp_path: Path) -> None:
    package = with_compiled / "immortal"
    for path in (package, *package.rglob("*")):
        os.utime(path, (1, 1))
    program = "import immortal.coordinator.core; from immortal.protocol import compiled; print(compiled.describe())"

    def described() -> str:
        caches = str(tmp_path / "caches")
        (said,) = run("-c", program, root=with_compiled, PYTHONDONTWRITEBYTECODE="", PYTHONPYCACHEPREFIX=caches)
        return said

    assert described() == "compiled codec and core"
    stamps = [with_compiled / one.folder / compiled.stamp_name() for one in compiled.SETS]
    assert all(stamp.exists() for stamp in stamps)
    machine = package / "coordinator" / "core" / "machine.py"
    kept = machine.read_bytes()
    machine.write_bytes(kept.replace(b"# ", b"#-", 1))  # of the same size
    assert described() == "compiled codec, pure Python core (the compiled one is of another source)"
    machine.write_bytes(kept)
    os.utime(machine, (1, 1))
    assert described() == "compiled codec and core"
    machine.with_name("another.py").touch()
    assert "pure Python core" in described()
    machine.with_name("another.py").unlink()
    os.utime(machine.parent, (1, 1))
    assert described() == "compiled codec and core"
    for text in ("damaged", "immortal.protocol.varint nowhere.so\n\n"):
        stamps[0].write_text(text)
        assert described() == "compiled codec and core"


@needs_compiled
@pytest.mark.parametrize("one", compiled.SETS, ids=lambda one: one.name)
def test_of_each_set_all_modules_run_compiled_or_none(with_compiled: Path, one: compiled.CompiledSet) -> None:
    list(one.paths(with_compiled).values())[-1].unlink()
    program = "import immortal.coordinator.core; from immortal.protocol import compiled; print(compiled.describe())"
    (said,) = run("-c", program, root=with_compiled)
    assert f"pure Python {one.name}" in said
    assert said.count("pure Python") == 1


@pytest.mark.parametrize(("one", "compiler"), [(compiled.CODEC, "Cython"), (compiled.CORE, "mypyc")])
def test_without_its_compiler_the_installation_goes_on_in_pure_python(
    copied: Path, one: compiled.CompiledSet, compiler: str
) -> None:
    """The other set is there already: to compile it takes long."""
    for other in set(compiled.SETS) - {one}:
        for path in other.paths(copied).values():
            path.parent.mkdir(exist_ok=True)
            path.touch()
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, copied)
    (copied / "src").mkdir()
    (copied / "src" / "immortal").symlink_to("../immortal")
    missing = copied / "missing" / compiler
    missing.mkdir(parents=True)
    (missing / "__init__.py").write_text(f"raise ImportError('there is no {compiler}')\n")
    lines = run("setup.py", "-q", "build_ext", "--inplace", root=copied, PYTHONPATH=str(missing.parent))
    assert f"setup: pure Python {one.name}: it could not be compiled: there is no {compiler}" in lines
    assert not any(path.exists() for path in one.paths(copied).values())


@pytest.mark.parametrize("name", ["appsdk/calls/context", "appsdk/calls/outbox"])
def test_each_attribute_is_declared_where_the_class_is_compiled(name: str) -> None:
    """A compiled class has only those: an assignment to another one would end the app."""
    declared = (ROOT / f"{name}.pxd").read_text()
    found = 0
    for node in ast.parse((ROOT / f"{name}.py").read_text()).body:
        if isinstance(node, ast.ClassDef) and (
            part := re.search(rf"cdef class {node.name}:\n((?:    .*\n)+)", declared)
        ):
            assigned = {
                each.attr
                for each in ast.walk(node)
                if isinstance(each, ast.Attribute)
                and isinstance(each.ctx, ast.Store)
                and ast.unparse(each.value) == "self"
            }
            assert assigned <= set(re.findall(r"\w+", part[1])), node.name
            found += 1
    assert found
