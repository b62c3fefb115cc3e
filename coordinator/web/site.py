"""What all requests share."""

from __future__ import annotations

from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.web.fleet import Fleet
from immortal.coordinator.web.jobs import Jobs
from immortal.coordinator.web.logs import Logs
from immortal.coordinator.web.notes import Notes
from immortal.coordinator.web.sql_runs import SqlRuns
from immortal.coordinator.web.token import Token
from immortal.replay.travel.sessions import Sessions


class Site:
    """One server's registry, what it has read of it lately, and what runs for it. Methods are called by all threads."""

    def __init__(self, registry: Registry, token: Token, *, allow_actions: bool = False) -> None:
        self.registry = registry
        self.token = token
        self.allow_actions = allow_actions
        self.logs = Logs()
        self.fleet = Fleet(registry, self.logs)
        self.travel = Sessions(registry.home)
        self.notes = Notes(registry.home)
        self.jobs = Jobs(registry.home)
        self.sql = SqlRuns()

    def settings(self, name: str) -> InstanceSettings:
        """Raises UnknownInstanceError, ConfigError."""
        return self.registry.load(name)

    def close(self) -> None:
        self.fleet.close()
        self.travel.close()
        self.jobs.close()
        self.sql.close()
