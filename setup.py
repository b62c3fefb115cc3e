"""The compiled codec and core, optional: with no C compiler, no Cython or no mypy the installation goes through, in
pure Python. With IMMORTAL_PURE_PYTHON=1 nothing is compiled, and the wheel is one for every Python (py3-none-any).

What is compiled and how it is found: ``protocol/compiled.py``. All else is in ``pyproject.toml``.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Distribution, Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent / "src"
sys.path.insert(0, str(ROOT))
from immortal.protocol import compiled  # noqa: E402

FLAGS = [] if sys.platform == "win32" else ["-O2", "-g0", "-w"]  # debug information takes as long as the code
CORE_FLAGS = [*FLAGS, "-fno-asynchronous-unwind-tables"] if FLAGS else []


def translate_codec(scratch: Path) -> list[Any]:
    """Translate the codec by Cython. Raises what Cython raises."""
    from Cython.Build import cythonize

    extensions = [
        Extension(module, [f"{module.replace('.', '/')}.py"], extra_compile_args=FLAGS) for module in compiled.MODULES
    ]
    return list(cythonize(extensions, build_dir=str(scratch / "c"), language_level=3, quiet=True))


def translate_core(scratch: Path) -> list[Any]:
    """Translate the core by mypyc, without types of other packages: it is the same wherever it is built. Raises what
    mypyc raises.
    """
    from mypyc.build import mypycify

    modules = set(compiled.CORE.paths(ROOT)) - {compiled.CORE_SHARED}
    files = [f"{module.replace('.', '/')}.py" for module in sorted(modules)]
    options = [
        "--config-file=",
        "--ignore-missing-imports",
        f"--cache-dir={scratch / 'mypy'}",
        "--no-warn-unused-ignores",
    ]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):  # also remarks on how it compiles them
        try:
            extensions = mypycify(
                [*options, *files],
                opt_level="2",
                debug_level="0",
                multi_file=True,
                target_dir=str(scratch / "c"),
                group_name=compiled.CORE_GROUP,
            )
        except SystemExit:
            raise RuntimeError(said.getvalue().strip()) from None
    for extension in extensions:
        extension.extra_compile_args = [*extension.extra_compile_args, *CORE_FLAGS]
    return extensions


TRANSLATORS: dict[compiled.CompiledSet, Callable[[Path], list[Any]]] = {
    compiled.CODEC: translate_codec,
    compiled.CORE: translate_core,
}


class BuildCompiled(build_ext):
    """Compiles what is not there yet, in place or in the wheel, and puts it where ``protocol.compiled`` looks."""

    def run(self) -> None:
        is_in_place = self.inplace or self.editable_mode
        root = ROOT if is_in_place else Path(self.build_lib).resolve()
        self.built: list[str] = []
        for one in compiled.SETS:
            in_place = one.paths(ROOT)
            paths = {module: root / path.relative_to(ROOT) for module, path in in_place.items()}
            try:
                if all(path.exists() for path in in_place.values()):
                    put(in_place, paths)
                else:
                    with tempfile.TemporaryDirectory(prefix="immortal-compile-") as scratch, contextlib.chdir(ROOT):
                        put(compile_set(TRANSLATORS[one], Path(scratch), list(paths)), paths)
            except (Exception, SystemExit) as error:
                print(f"setup: pure Python {one.name}: it could not be compiled: {error}", file=sys.stderr)
            else:
                self.built += [] if is_in_place else [str(path) for path in paths.values()]

    def get_outputs(self) -> list[str]:
        return getattr(self, "built", [])

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class BuildSideBySide(build_ext):
    """Compiles the files of an extension side by side: setuptools does so with extensions only, and the core is one."""

    def build_extensions(self) -> None:
        compiler, count = self.compiler, os.cpu_count()

        def compile_all(
            sources: Sequence[str],
            output_dir: Any = None,
            macros: Any = None,
            include_dirs: Any = None,
            debug: bool = False,
            extra_preargs: Any = None,
            extra_postargs: Any = None,
            depends: Any = None,
        ) -> list[str]:
            _, objects, after, options, build = compiler._setup_compile(
                output_dir, macros, include_dirs, sources, depends, extra_postargs
            )
            before = compiler._get_cc_args(options, debug, extra_preargs)
            with ThreadPoolExecutor(count) as pool:
                list(pool.map(lambda one: compiler._compile(one, *build[one], before, after, options), objects))
            return list(objects)

        compiler.compile = compile_all
        super().build_extensions()


def compile_set(translate: Callable[[Path], list[Any]], scratch: Path, modules: Sequence[str]) -> dict[str, Path]:
    """Compile a set; return where in ``scratch`` each module is. Raises what the compilers raise."""
    command = BuildSideBySide(Distribution({"ext_modules": translate(scratch)}))
    command.build_lib, command.build_temp = str(scratch / "lib"), str(scratch / "objects")
    command.parallel = os.cpu_count()
    command.ensure_finalized()
    command.run()
    return {module: Path(command.get_ext_fullpath(module)) for module in modules}


def put(made: Mapping[str, Path], paths: Mapping[str, Path]) -> None:
    """Each module to its path; what was there before of another source goes."""
    folder = next(iter(paths.values())).parent
    folder.mkdir(parents=True, exist_ok=True)
    for module, path in paths.items():
        if made[module] == path:
            continue
        whole = Path(tempfile.mkdtemp(dir=folder)) / path.name
        shutil.copyfile(made[module], whole)
        whole.replace(path)  # at once: another process may be about to import it
        whole.parent.rmdir()
    ending = next(iter(paths.values())).name.rpartition("-")[2].partition(".")[2]
    for old in folder.glob(f"*.{ending}"):
        if old not in paths.values():
            old.unlink()


# BuildCompiled knows which; without any it is not asked, and the wheel is one for every Python and machine.
EXTENSIONS = [Extension(compiled.CORE_SHARED, [])] if compiled.is_wanted() else []

setup(cmdclass={"build_ext": BuildCompiled}, ext_modules=EXTENSIONS)
