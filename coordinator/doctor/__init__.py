"""`immortal doctor`: what is wrong with an installation, a home, its disks, the clock and the limits of a machine.

Each module looks at one of them and yields findings. They read, and measure; they change nothing.
"""

from immortal.coordinator.doctor.examination import examine, examine_instance
from immortal.coordinator.doctor.finding import Area, Finding, Level

__all__ = ["Area", "Finding", "Level", "examine", "examine_instance"]
