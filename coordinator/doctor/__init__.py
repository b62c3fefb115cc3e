"""Checks of `immortal doctor`: of the installation, a home, its disks, and the machine's clock, limits and memory.

Each module checks one area and yields findings. It reads and measures, and changes nothing.
"""

from immortal.coordinator.doctor.examination import examine, examine_instance
from immortal.coordinator.doctor.finding import Area, Finding, Level

__all__ = ["Area", "Finding", "Level", "examine", "examine_instance"]
