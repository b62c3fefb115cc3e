"""Groups of instances and ordered multicast. `docs/how-to/ordering.md`."""

from immortal.appsdk.patterns.groups import *  # noqa: F403
from immortal.appsdk.patterns.groups import __all__ as __all__
