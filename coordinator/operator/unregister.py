"""Removal of an instance: its settings, its files outside the log, and on request its log."""

from __future__ import annotations

import contextlib
import shutil

from immortal.coordinator import audit, clock
from immortal.coordinator.app import secret as app_secret
from immortal.coordinator.config import ConfigError, InstanceSettings
from immortal.coordinator.config.socket_addresses import SOCKET_FILE_NAME, socket_path
from immortal.coordinator.core.errors import LogError, LogUnavailableError
from immortal.coordinator.instances import own_logs, upgrade_mark
from immortal.coordinator.instances.registry import Registry, RegistryError, remove_file
from immortal.coordinator.log.open import log_exists, place_of
from immortal.coordinator.log_url import is_in_folder
from immortal.coordinator.operator import control
from immortal.coordinator.peers import keys
from immortal.protocol import executions, kept_code
from immortal.protocol.timings import FOLDER_NAME


def unregister(registry: Registry, name: str, *, delete_log: bool = False) -> str:
    """Remove the settings of ``name``, its keys, and with ``delete_log`` its log; return the log's place.

    Raises RunningError if the instance runs.
    """
    with registry.locked():
        try:
            settings = registry.load(name)
        except ConfigError:
            if delete_log:
                raise  # only the file that can't be read tells the log's place
            settings = None
        folder = registry.home / name
        control.refuse_running(folder)
        if settings is not None and registry.copy is not None:
            holder = None if is_in_folder(settings.log) else place_of(settings.log).holder()
            if holder is not None:
                raise RegistryError(f"{name!r} runs at {holder}: stop it there first")
        shutil.rmtree(folder / own_logs.COLUMNS_FOLDER_NAME, ignore_errors=True)
        shutil.rmtree(folder / FOLDER_NAME, ignore_errors=True)
        if delete_log and settings is not None:
            delete_log_of(settings)
        with contextlib.suppress(LogUnavailableError):  # then they stay, with the log
            if settings is not None and not log_exists(settings.log):
                own_logs.remove(folder)
        remove_file(registry.path(name))
        control.path(folder).unlink(missing_ok=True)
        control.supervisor_path(folder).unlink(missing_ok=True)
        app_secret.remove(folder)
        keys.remove(folder)
        control.socket_path(folder).unlink(missing_ok=True)
        socket_path(folder, SOCKET_FILE_NAME).unlink(missing_ok=True)
        upgrade_mark.clear(folder)
        with contextlib.suppress(OSError):
            folder.rmdir()  # stays where it still holds the log
    return settings.log if settings is not None else str(folder / "log")


def delete_log_of(settings: InstanceSettings) -> None:
    """Delete the log of an instance that does not run, and so its state. Raises RegistryError if that fails."""
    try:
        place_of(settings.log).remove()
    except LogError as error:
        raise RegistryError(str(error)) from None
    if settings.log == str(settings.folder / "log"):
        shutil.rmtree(settings.log, ignore_errors=True)
    audit.remove(settings.folder)
    clock.remove(settings.folder)
    shutil.rmtree(settings.folder / kept_code.FOLDER_NAME, ignore_errors=True)
    for path in settings.folder.glob(f"{executions.FILE_NAME}*"):  # and SQLite's files beside it
        path.unlink(missing_ok=True)
