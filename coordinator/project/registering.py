"""The registry of a project, kept as its file says."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from typing import Any

from immortal.coordinator.config import ConfigError, check_settings, split_tcp, write_atomically
from immortal.coordinator.config.reading import read_toml
from immortal.coordinator.instances import own_logs
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.peers import keys
from immortal.coordinator.project.project import PlannedService
from immortal.coordinator.project.schema import PEER_DEFAULT


def register(registry: Registry, service: PlannedService) -> str:
    """Register ``service``, or bring what is registered up to what the project says; "" if nothing was to be done,
    else what was, in words. What the project does not mention stays as it is. Raises ConfigError, RegistryError.
    """
    given = dict(service.settings)
    peer = given.pop("peer", PEER_DEFAULT)
    if service.name not in registry.names():
        settings = registry.register(service.name, peer, app=service.app, **given)
        keys.make(settings.folder)
        own_logs.OwnLogs(settings.folder).begin()
        return f"registered, peers at {settings.peer}"
    address = split_tcp(peer)
    if address is None or address[1] or (split_tcp(registry.load(service.name).peer) or ("",))[0] != address[0]:
        given["peer"] = peer
    changed = _update(registry, service.name, given)
    return f"its settings have changed: {', '.join(changed)}" if changed else ""


def _update(registry: Registry, name: str, given: Mapping[str, Any]) -> list[str]:
    """The settings file with what of ``given`` it says differently; which settings these were."""
    import tomlkit  # here: few commands write settings

    path = registry.path(name)
    with registry.locked():
        values, _ = read_toml(path)
        changed = {key: value for key, value in given.items() if values.get(key) != value}
        if not changed:
            return []
        if str(changed.get("peer", "")).endswith(":*"):
            raise ConfigError(
                f"{name!r} is registered at {values.get('peer')}, and is to be at {changed['peer']}: name its port, or"
                f" 'immortal unregister {name}' first"
            )
        document = tomlkit.parse(path.read_text("utf-8"))
        for key, value in changed.items():
            document[key] = value
        text = tomlkit.dumps(document)
        check_settings(values | changed, name, path, text)
        write_atomically(path, text.encode(), mode=stat.S_IMODE(path.stat().st_mode))
    return sorted(changed)
