"""Clients, which call an instance from outside exactly once, through every crash. `docs/how-to/clients.md`."""

from immortal.appsdk.client import *  # noqa: F403
from immortal.appsdk.client import __all__ as __all__
