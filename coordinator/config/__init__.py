"""The settings of one instance: a TOML file, read strictly, written whole or not at all.

    peer = "tcp://127.0.0.1:7001"       where other coordinators reach this one

Everything else has a default. A file that says something which is not understood is an error that names the file, the
line and the field: a typo must not become a default. Every setting stands in :mod:`coordinator.config.schema`, once.
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
