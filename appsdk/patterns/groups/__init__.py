"""Groups of instances, with ordered multicasts to their members: ``prices = group(Book, "prices", members=["b1",
"b2"])``.

`docs/how-to/ordering.md` has the guarantees; :mod:`immortal.appsdk.ordering.groups` the members' protocol.
"""

from immortal.appsdk.patterns.groups.members import Grouped, group

__all__ = ["Grouped", "group"]
