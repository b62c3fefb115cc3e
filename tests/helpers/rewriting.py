"""Compile the test modules as pytest does, once and on all processors; else each of parallel processes compiles all."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

from _pytest.assertion import install_importhook, rewrite
from _pytest.config import get_config

CONFIG = get_config()


def compile_module(path: Path) -> None:
    """Write the cached form of a test module, unless it is there and of this text."""
    cached = rewrite.get_cache_dir(path) / (path.name.removesuffix(".py") + rewrite.PYC_TAIL)
    if rewrite._read_pyc(path, cached) is None:
        rewrite.try_makedirs(cached.parent)
        source_hash, code = rewrite._rewrite_test(path, CONFIG)
        rewrite._write_pyc(CONFIG.stash[rewrite.assertstate_key], code, source_hash, cached)


if __name__ == "__main__":
    install_importhook(CONFIG)
    with multiprocessing.get_context("fork").Pool() as pool:
        pool.map(compile_module, sorted(Path("tests").absolute().rglob("test_*.py")), chunksize=8)
