"""What the user's modules hold, asked in a process of their own: nothing of theirs is imported here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from immortal.protocol import decoding
from immortal.protocol.errors import ImmortalError


class ListingError(ImmortalError):
    """A module can't be imported; the text says why, with the traceback of the user's code."""


class ListedService(msgspec.Struct, frozen=True):
    """``peers``: the names of the instances that it calls. ``is_own``: the module defines it, in its newest version."""

    version: int
    peers: list[str]
    is_own: bool


class Listing(msgspec.Struct, frozen=True):
    """``services``: by class name. ``files``: of the project that the module is made of."""

    services: dict[str, ListedService]
    files: list[str]


def list_module(module: str, folder: Path, environment: Mapping[str, str]) -> Listing:
    """Import ``module`` of ``folder`` in a process with ``environment``. Raises ListingError."""
    argv = [sys.executable, "-P", "-m", "immortal.appsdk.running.listing", module]
    done = subprocess.run(
        argv, cwd=folder, env=dict(environment), stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    if done.returncode != 0:
        said = done.stderr.decode("utf-8", "replace").strip()
        raise ListingError(said or f"importing {module} ended its process with status {done.returncode}")
    return decoding.decode_json(done.stdout, type=Listing)
