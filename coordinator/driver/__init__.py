"""What carries out a machine's effects: turn by turn (`turn`), through ports (`ports`).

In service, in the simulation, in the environment of users' tests: always this one.
"""

import immortal.coordinator.core  # which says whether turn.py runs compiled  # noqa: F401
