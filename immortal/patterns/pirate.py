"""Requests to a pool of servers, each executed once. `docs/patterns/pirate.md`."""

from immortal.appsdk.patterns.pirate import *  # noqa: F403
from immortal.appsdk.patterns.pirate import __all__ as __all__
