"""Discovery of peers' addresses: in the instance's settings, then the registry folder, then by a template.

The first two can name a log in a database: then the lease of the log has the endpoint of its instance. All sources are
polled, at a limited rate, so that a peer that starts later, or at another address, is found without a restart. A route
stays in use until another one is found.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator

from msgspec import Struct

from immortal.coordinator.config import ConfigError, InstanceSettings, check_instance_name
from immortal.coordinator.config.values import NAME_PLACE, is_endpoint, is_log_url
from immortal.coordinator.instances.registry import Registry, UnknownInstanceError
from immortal.coordinator.log.backend import EndpointWatch
from immortal.coordinator.log.open import place_of
from immortal.coordinator.log_url import is_in_folder
from immortal.protocol.errors import ImmortalError

POLL_NS = 2_000_000_000  # between two polls while all is well: a few stats for each peer
LEASE_POLL_NS = 100_000_000  # while leases are watched: the watcher learns of a peer's move at once
FAST_POLL_NS = 200_000_000  # while a peer is unknown or not connected: far shorter than its restart
UNCONNECTED_WARNING_NS = 10_000_000_000  # a restart takes less time, and needs no warning
LATE_NS = 1_000_000_000  # a poll can be late by this on a busy machine
WARNING_REPEAT_NS = 60_000_000_000


class Origin(enum.StrEnum):
    """Source of a peer's address."""

    SETTINGS = "settings"
    REGISTRY = "registry"
    TEMPLATE = "template"
    LEASE = "lease"


class Route(Struct, frozen=True):
    """Address of a peer, and its source."""

    endpoint: str
    origin: Origin


class Discovery:
    """Discovery of one instance's peers, by its current settings and the registry folder."""

    def __init__(self, settings: InstanceSettings, registry: Registry) -> None:
        self._settings = settings
        self._registry = registry
        self.problem = ""  # why the settings can't be read; the earlier ones stay in use
        self.lease_watcher = LeaseWatcher()

    def read_settings(self) -> None:
        """Read the instance's settings again if they have changed."""
        try:
            self._settings = self._registry.load(self._settings.name)
            self.problem = ""
        except ImmortalError as error:
            self.problem = str(error)

    def find(self, name: str) -> Route:
        """Return the route to the peer ``name``. Raises UnknownInstanceError if no source has it, ConfigError for a
        settings file that can't be read."""
        settings = self._settings
        if name in settings.peers:
            place = settings.peers[name]
            if not is_log_url(place):
                return Route(place, Origin.SETTINGS)
            endpoint = self.lease_watcher.endpoint(place)
            if endpoint is None:
                raise UnknownInstanceError(f"nobody is known yet who writes the log of {name!r}, {place}")
            return Route(endpoint, Origin.LEASE)
        check_instance_name(name)
        try:
            if settings.peer_template is None or self._registry.path(name).exists():
                registered = self._registry.load(name)
                leased = self._from_lease(registered)
                return Route(registered.peer, Origin.REGISTRY) if leased is None else Route(leased, Origin.LEASE)
        except UnknownInstanceError as error:
            raise UnknownInstanceError(
                f"{error}; register it there, or say where it is in {self._registry.path(settings.name)}: under "
                f"[peers], or by peer_template"
            ) from None
        return Route(settings.peer_template.replace(NAME_PLACE, name), Origin.TEMPLATE)

    def _from_lease(self, settings: InstanceSettings) -> str | None:
        """Return the endpoint in the lease of the instance's log; None if none is known.

        If the registry is in the same database, its copy here has the endpoint.
        """
        copy = self._registry.copy
        if copy is None or not copy.has_log(settings.name, settings.log):
            return self.lease_watcher.endpoint(settings.log)
        endpoint = copy.endpoint(settings.name, settings.log)
        return endpoint if endpoint is not None and is_endpoint(endpoint) else None

    @property
    def is_notified(self) -> bool:
        """True if leases are watched, so that a peer's move is known at once."""
        return self._registry.copy is not None or self.lease_watcher.is_used

    def may_be_known(self, name: str) -> bool:
        """Return True if :meth:`find` may now find the peer ``name``; cheaper than find()."""
        settings = self._settings
        return name in settings.peers or settings.peer_template is not None or self._registry.path(name).exists()


class _Destination(Struct):
    route: Route | None = None
    problem: str = ""  # why there is no route
    unconnected_since_ns: int | None = None
    warned_ns: int | None = None  # when a warning was last given


class Routes:
    """Routes to the peers that an instance calls. Times are of a monotonic clock, in ns."""

    def __init__(self, discovery: Discovery, warn: Callable[[str], None]) -> None:
        self._discovery = discovery
        self._warn = warn
        self._destinations: dict[str, _Destination] = {}
        self._warned_problem = ""
        self._next_poll_ns = 0

    def add(self, name: str, now_ns: int) -> None:
        """Look up the peer ``name``, which the instance calls; keep the route to it up to date from now on."""
        if name not in self._destinations:
            destination = self._destinations[name] = _Destination()
            self._look_up(name, destination)
            self._warn_if_unreachable(name, destination, now_ns)
            self._next_poll_ns = now_ns + FAST_POLL_NS

    def endpoint(self, name: str) -> str | None:
        destination = self._destinations.get(name)
        return None if destination is None or destination.route is None else destination.route.endpoint

    def describe(self, name: str) -> dict[str, str | None]:
        """Return the peer's ``endpoint``, ``origin``, and the ``problem`` that prevents its discovery, each or None.

        A peer that the instance does not call is looked up now.
        """
        destination = self._destinations.get(name)
        if destination is None:
            destination = _Destination()
            self._look_up(name, destination)
        route = destination.route
        return {
            "endpoint": route.endpoint if route else None,
            "origin": route.origin.value if route else None,
            "problem": destination.problem or None,
        }

    def names_at(self, endpoint: str) -> Iterator[str]:
        """Return the names of the called peers that are reached at ``endpoint``."""
        return (
            name
            for name, destination in self._destinations.items()
            if destination.route and destination.route.endpoint == endpoint
        )

    def next_deadline_ns(self) -> int | None:
        """Return the time of the next :meth:`poll`; None if the instance calls no peer."""
        return self._next_poll_ns if self._destinations else None

    def close(self) -> None:
        self._discovery.lease_watcher.close()

    def poll(self, now_ns: int, connected: Callable[[str], bool]) -> list[tuple[str, str | None]]:
        """Look up all routes again if that is due; return the names that have moved, each with its former endpoint."""
        if not self._destinations or now_ns < self._next_poll_ns:
            return []
        late_ns = max(0, now_ns - self._next_poll_ns - LATE_NS)  # this process did not run, or was busy
        self._discovery.read_settings()
        problem = self._discovery.problem
        if problem and problem != self._warned_problem:
            self._warn(f"the settings as they were stay in use: {problem}")
        self._warned_problem = problem
        moved: list[tuple[str, str | None]] = []
        all_well = True
        for name, destination in self._destinations.items():
            before = self.endpoint(name)
            if before is not None or self._discovery.may_be_known(name):
                self._look_up(name, destination)
            endpoint = self.endpoint(name)
            if endpoint != before:
                moved.append((name, before))
            if endpoint is not None and connected(endpoint):
                destination.unconnected_since_ns = destination.warned_ns = None
            else:
                all_well = False
                if destination.unconnected_since_ns is not None:
                    destination.unconnected_since_ns += late_ns  # a new connection may not be noticed yet
                self._warn_if_unreachable(name, destination, now_ns)
        pause_ns = POLL_NS if all_well else FAST_POLL_NS
        self._next_poll_ns = now_ns + (LEASE_POLL_NS if self._discovery.is_notified else pause_ns)
        return moved

    def _look_up(self, name: str, destination: _Destination) -> None:
        try:
            destination.route = self._discovery.find(name)
            destination.problem = ""
        except UnknownInstanceError as error:
            if destination.route is None:  # an unregistered peer may still be at its old address
                destination.problem = str(error)
        except ConfigError as error:
            destination.problem = str(error)

    def _warn_if_unreachable(self, name: str, destination: _Destination, now_ns: int) -> None:
        if destination.unconnected_since_ns is None:
            destination.unconnected_since_ns = now_ns
        if destination.warned_ns is not None and now_ns - destination.warned_ns < WARNING_REPEAT_NS:
            return
        if destination.route is None:
            self._warn(f"nothing is sent to {name!r}, its calls wait: {destination.problem}")
        elif now_ns - destination.unconnected_since_ns >= UNCONNECTED_WARNING_NS:
            route = destination.route
            silent_s = (now_ns - destination.unconnected_since_ns) // 1_000_000_000
            self._warn(
                f"no connection to {name!r} at {route.endpoint} (by the {route.origin}) for {silent_s} s, its calls "
                f"wait: start it, or correct where it is"
            )
        else:
            return
        destination.warned_ns = now_ns


class LeaseWatcher:
    """Watcher of the leases of logs in databases, with a thread and a connection for each log that was asked for."""

    def __init__(self) -> None:
        self._watches: dict[str, EndpointWatch | None] = {}

    def endpoint(self, log: str) -> str | None:
        """Return the endpoint in the lease of ``log``; None if it is not known (yet). Does not block."""
        if is_in_folder(log):
            return None
        if log not in self._watches:
            try:
                self._watches[log] = place_of(log).watch()
            except ImmortalError:  # the database's driver is not installed: use the endpoint in the settings
                self._watches[log] = None
        watch = self._watches[log]
        endpoint = None if watch is None else watch.endpoint
        return endpoint if endpoint is not None and is_endpoint(endpoint) else None  # anybody may have written it

    @property
    def is_used(self) -> bool:
        return any(watch is not None for watch in self._watches.values())

    def close(self) -> None:
        for watch in self._watches.values():
            if watch is not None:
                watch.close(0)
