"""Callers from outside: a client calls an instance exactly once, through every crash. `docs/how-to/clients.md`."""

from immortal.appsdk.client import *  # noqa: F403
from immortal.appsdk.client import __all__ as __all__
