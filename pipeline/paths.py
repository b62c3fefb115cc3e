"""From what a user gives to logs: URLs of logs, databases and archives, log folders, an instance's folder, a registry's
home, patterns of them."""

from __future__ import annotations

import glob
import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from immortal.coordinator.core.errors import LogError
from immortal.coordinator.log import log_exists
from immortal.coordinator.log.open import place_of
from immortal.coordinator.log_url import FOLDERS, split_url
from immortal.pipeline.errors import SourceError
from immortal.protocol import decoding


def paths_of(options: Mapping[str, str]) -> list[str]:
    """The options path (several separated by commas) and paths (a JSON list, as Spark writes load([...]))."""
    paths = [part.strip() for part in options.get("path", "").split(",")]
    if listed := options.get("paths"):
        try:
            values = decoding.load_json(listed)
        except ValueError:
            values = None
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise SourceError(f"option paths: {listed!r}: a JSON list of strings was expected")
        paths += values
    return [path for path in paths if path]


def folder_of(url: str) -> str:
    """The folder that ``file://`` means, as Spark writes paths; anything else as it is."""
    return url.removeprefix("file://")


def log_folders(paths: list[str], *, may_be_none: bool = False) -> list[str]:
    """Every log at ``paths``, folders absolute, sorted, each once. Raises SourceError where there is none."""
    if not paths:
        raise SourceError("no path was given: load() takes log folders, or a registry's home")
    found: dict[str, str] = {}
    for given in paths:
        path = folder_of(given)
        if split_url(path)[0] != FOLDERS or ("#" in given and path != given):
            found |= {url: url for url in _urls(given, may_be_none=may_be_none)}
            continue
        matches = sorted(glob.glob(path)) if glob.has_magic(path) and not os.path.exists(path) else [path]
        folders = [folder for match in matches for folder in _folders(Path(match))]
        if not folders and path != given and os.path.isdir(path):
            folders += _urls(given, may_be_none=True)
        if not folders and not may_be_none:
            raise SourceError(_nothing_at(path, matches))
        for folder in folders:
            if isinstance(folder, str):
                found.setdefault(folder, folder)
            else:
                found.setdefault(os.path.realpath(folder), os.path.abspath(folder))
    return sorted(found.values())


def _urls(url: str, *, may_be_none: bool) -> list[str]:
    """The logs that are in no folder: the one that is named, or all of a database or an archive. Raises SourceError."""
    try:
        place = place_of(url)
        names = place.instances()
        if names is None:
            if not place.exists():
                raise SourceError(f"there is no log {url}")
            return [url]
    except LogError as error:
        raise SourceError(str(error)) from None
    if not names and not may_be_none:
        raise SourceError(f"there is no log of any instance in {url}")
    return [f"{url.rstrip('/')}#{name}" for name in names]


def _nothing_at(path: str, matches: list[str]) -> str:
    if not matches:
        return f"nothing matches {path}"
    if not os.path.exists(matches[0]):
        return f"there is no folder {path}"
    if not os.path.isdir(matches[0]):
        return f"{path} is a file: a log folder, or a registry's home, was expected"
    expected = "a log folder, the URL of a log or of an archive, or a registry's home"
    return f"there is no log in {path}: {expected}, was expected"


def _folders(path: Path) -> Iterator[Path | str]:
    """Log folders, and the URLs of logs that are in none."""
    if log_exists(path):
        yield path
        return
    if log_exists(path / "log"):
        yield path / "log"
        return
    try:
        entries = sorted(path.iterdir())
    except OSError:
        return
    for entry in entries:
        if entry.suffix == ".toml" and not entry.name.startswith("."):
            log = _registered_log(entry)
            if log_exists(log):  # an instance that was never started has none
                yield log
        elif entry.is_dir() and log_exists(entry / "log"):
            yield entry / "log"


def _registered_log(settings: Path) -> Path | str:
    """Return the log that an instance's settings name (immortal.coordinator.config writes them)."""
    default = settings.with_suffix("") / "log"
    try:
        log = tomllib.loads(settings.read_text()).get("log")
    except (OSError, ValueError):
        return default
    if not isinstance(log, str):
        return default
    scheme, location = split_url(log)
    return settings.parent / location if scheme == FOLDERS else log
