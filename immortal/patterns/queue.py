"""A durable queue of tasks. `docs/patterns/queue.md`."""

from immortal.appsdk.patterns.queue import *  # noqa: F403
from immortal.appsdk.patterns.queue import __all__ as __all__
