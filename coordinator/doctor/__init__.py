"""Checks of `immortal doctor`: of the installation, a home, its disks, and the machine's clock, limits and memory.

Each module checks one area and yields findings. It reads and measures, and changes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from immortal.coordinator.config import ConfigError, InstanceSettings
from immortal.coordinator.doctor import home, installation, machine
from immortal.coordinator.doctor.finding import Area, Finding, Level
from immortal.coordinator.instances.registry import Registry, RegistryError
from immortal.coordinator.log_url import is_in_folder, split_url

__all__ = ["Area", "Finding", "Level", "examine", "examine_instance"]


def examine(registry: Registry) -> Iterator[Finding]:
    """Check the installation, the home and all its instances, the disks of their logs, clock, limits and memory."""
    yield from installation.findings()
    yield from home.findings(registry)
    settings = _readable(registry)
    for folder in _distinct_disks([registry.home, *map(_log_folder, settings)]):
        yield from machine.findings(folder)
    yield from machine.clock_findings(_files(registry.home))
    yield from machine.limit_findings(len(settings))


def examine_instance(registry: Registry, settings: InstanceSettings) -> Iterator[Finding]:
    """Check one instance: its files, and the disk of its log."""
    yield from home.findings_of(registry, settings.name)
    if is_in_folder(settings.log):
        yield from machine.findings(_log_folder(settings))


def _readable(registry: Registry) -> list[InstanceSettings]:
    settings = []
    try:
        for name in registry.names():
            try:
                settings.append(registry.load(name))
            except ConfigError:
                continue  # the home's findings say so
    except RegistryError:
        pass
    return settings


def _log_folder(settings: InstanceSettings) -> Path:
    """Return the folder of the log; for a log in a database the instance's own folder, with its keys."""
    return Path(split_url(settings.log)[1]) if is_in_folder(settings.log) else settings.folder


def _distinct_disks(folders: list[Path]) -> Iterator[Path]:
    seen: set[int] = set()
    for folder in folders:
        device = os.stat(machine.nearest_existing(folder)).st_dev
        if device not in seen:
            seen.add(device)
            yield folder


def _files(folder: Path) -> Iterator[Path]:
    """Yield the registry's own files and those of its instances, but nothing deeper."""
    try:
        for path in folder.iterdir():
            yield path
            if path.is_dir():
                yield from path.iterdir()
    except OSError:
        return
