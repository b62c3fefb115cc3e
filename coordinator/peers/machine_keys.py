"""Keys of an instance of a shared registry, made on each machine that may run it; none leaves its machine."""

from __future__ import annotations

from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.instances.own_logs import OwnLogs
from immortal.coordinator.instances.registry import Registry, RegistryError
from immortal.coordinator.log import log_exists
from immortal.coordinator.log_url import is_in_folder
from immortal.coordinator.peers import keys
from immortal.protocol.shared_registry import SharedHomeError


def ensure_machine_keys(settings: InstanceSettings, registry: Registry) -> bool:
    """Make keys for the instance on this machine and announce its address, if the registry is that of many machines.
    Return whether keys were made.

    Raises RegistryError for an instance whose log another machine has, KeysError, LogError, SharedHomeError.
    """
    copy = registry.copy
    if copy is None:
        return False
    is_here = log_exists(settings.log) or OwnLogs(settings.folder).is_kept if is_in_folder(settings.log) else True
    if not is_here:  # with a log of its own it would be a second instance of that name
        raise RegistryError(
            f"the log of {settings.name!r} is in a folder, {settings.log}, of the machine where it was registered: run"
            f" it there, or bring the log into the database there ('immortal log copy {settings.name} --to {copy.url}"
            " --switch')"
        )
    has_some = bool(keys.read_pairs(settings.folder))
    if not has_some:
        keys.make(settings.folder)
    try:
        copy.announce(settings.name, settings.peer)
    except SharedHomeError:
        if not has_some:
            raise
        # The database is away, but it has a key of this machine: peers try the known keys in turn.
    return not has_some
