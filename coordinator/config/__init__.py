"""Settings of one instance: a TOML file, read strictly, written atomically.

    peer = "tcp://127.0.0.1:7001"       where other coordinators reach this one

Every other setting has a default. An unknown field in the file is an error that names the file, the line and the field:
a typo must not become a default. Each setting is defined once, in :mod:`coordinator.config.schema`.
"""

from immortal.coordinator.config.schema import AppAuth, AppSendMode, Checkpoints, InstanceSettings, Tuning
from immortal.coordinator.config.settings_file import (
    check_settings,
    line_of,
    override,
    read_settings,
    settings_text,
    write_atomically,
)
from immortal.coordinator.config.values import LOG_KEY_FILE, ConfigError, check_instance_name, split_tcp

__all__ = [
    "LOG_KEY_FILE",
    "AppAuth",
    "AppSendMode",
    "Checkpoints",
    "ConfigError",
    "InstanceSettings",
    "Tuning",
    "check_instance_name",
    "check_settings",
    "line_of",
    "override",
    "read_settings",
    "settings_text",
    "split_tcp",
    "write_atomically",
]
