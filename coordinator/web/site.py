"""What all requests share."""

from __future__ import annotations

from coordinator.config import InstanceSettings
from coordinator.instances.registry import Registry
from coordinator.web.fleet import Fleet
from coordinator.web.jobs import Jobs
from coordinator.web.logs import Logs
from coordinator.web.notes import Notes
from coordinator.web.sql_runs import SqlRuns
from coordinator.web.token import Token
from replay.travel.sessions import Sessions


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
