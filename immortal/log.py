"""Readers of logs. `docs/LOG_FORMAT.md`."""

from immortal.coordinator.log import *  # noqa: F403
from immortal.coordinator.log import __all__ as __all__
