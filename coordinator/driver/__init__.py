"""Driver: carries out a machine's effects, turn by turn (`turn`), through ports (`ports`).

The same driver runs in service, in the simulation and in the environment of users' tests.
"""

import immortal.coordinator.core  # which says whether turn.py runs compiled  # noqa: F401
