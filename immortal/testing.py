"""A test environment for services: real coordinators in memory, crashes and replays. `docs/how-to/testing.md`."""

from immortal.appsdk.testing import *  # noqa: F403
from immortal.appsdk.testing import __all__ as __all__
