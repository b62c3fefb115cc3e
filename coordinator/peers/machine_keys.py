"""Keys of an instance on each of the machines that may run it: none leaves the machine where it was made."""

from __future__ import annotations

from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.instances.own_logs import OwnLogs
from immortal.coordinator.instances.registry import Registry, RegistryError
from immortal.coordinator.log import log_exists
from immortal.coordinator.log_url import is_in_folder
from immortal.coordinator.peers import keys
from immortal.protocol.shared_registry import SharedHomeError


def make_own(settings: InstanceSettings, registry: Registry) -> bool:
    """Where the registry is that of many machines: this one has keys for the instance, and the registry knows where it
    is reached here. Whether some were made.

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
        # Peers try its keys in turns then.
    return not has_some
