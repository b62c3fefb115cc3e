"""Conversations over ZeroMQ that survive lost connections. `docs/patterns/messenger.md`."""

from immortal.coordinator.messenger import *  # noqa: F403
from immortal.coordinator.messenger import __all__ as __all__
