"""Groups of instances, with ordered multicasts to their members: ``prices = group(Book, "prices", members=["b1",
"b2"])``.

`docs/how-to/ordering.md` says what is promised; :mod:`immortal.appsdk.ordering.groups` how members agree.
"""

from immortal.appsdk.patterns.groups.members import Grouped, group

__all__ = ["Grouped", "group"]
