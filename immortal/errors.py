"""Errors of services, below :class:`ImmortalError`. `docs/reference/errors.md`."""

from immortal.appsdk.errors import *  # noqa: F403
from immortal.appsdk.errors import __all__ as __all__
