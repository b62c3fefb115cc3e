"""The compiled codec, optional: with no C compiler or no Cython the installation goes through, in pure Python.

What is compiled and how it is found: ``protocol/compiled.py``. All else is in ``pyproject.toml``.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))
from protocol import compiled  # noqa: E402

FLAGS = [] if sys.platform == "win32" else ["-O2", "-g0", "-w"]  # debug information takes as long as the code


class BuildCompiled(build_ext):
    """Compiles what is not there yet, in a folder of its own, and puts it where ``protocol.compiled`` looks."""

    def run(self) -> None:
        is_in_place = self.inplace or self.editable_mode
        root = ROOT if is_in_place else Path(self.build_lib).resolve()
        paths = {module: root / path.relative_to(ROOT) for module, path in compiled.compiled_paths(ROOT).items()}
        self.built = [str(path) for path in paths.values()]
        if all(path.exists() for path in paths.values()):
            return
        try:
            with tempfile.TemporaryDirectory(prefix="immortal-compile-") as scratch:
                self._compile(Path(scratch), paths)
        except (Exception, SystemExit) as error:
            self.built = []
            print(f"setup: pure Python codec: it could not be compiled: {error}", file=sys.stderr)

    def _compile(self, scratch: Path, paths: dict[str, Path]) -> None:
        from Cython.Build import cythonize

        pairs = zip(
            self.extensions,
            cythonize(
                [Extension(one.name, list(one.sources)) for one in self.extensions],
                build_dir=str(scratch / "c"),
                language_level=3,
                quiet=True,
            ),
            strict=True,
        )
        for extension, translated in pairs:
            extension.sources = translated.sources
        self.inplace = self.editable_mode = False
        self.parallel = self.parallel or os.cpu_count()
        self.build_lib, self.build_temp = str(scratch / "lib"), str(scratch / "objects")
        super().run()
        folder = next(iter(paths.values())).parent
        folder.mkdir(parents=True, exist_ok=True)
        for module, path in paths.items():
            whole = Path(tempfile.mkdtemp(dir=folder)) / path.name
            shutil.copyfile(self.get_ext_fullpath(module), whole)
            whole.replace(path)  # at once: another process may be about to import it
            whole.parent.rmdir()
        ending = next(iter(paths.values())).name.rpartition("-")[2].partition(".")[2]
        for old in folder.glob(f"*.{ending}"):
            if old not in paths.values():
                old.unlink()

    def get_outputs(self) -> list[str]:
        return [] if self.inplace or self.editable_mode else getattr(self, "built", [])

    def get_output_mapping(self) -> dict[str, str]:
        return {}


setup(
    cmdclass={"build_ext": BuildCompiled},
    ext_modules=[
        Extension(module, [f"{module.replace('.', '/')}.py"], extra_compile_args=FLAGS) for module in compiled.MODULES
    ],
)
