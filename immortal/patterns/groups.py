"""Groups of instances and ordered multicast. `docs/how-to/ordering.md`."""

from immortal.appsdk.patterns.groups import Grouped, group

__all__ = [
    "Grouped",
    "group",
]
