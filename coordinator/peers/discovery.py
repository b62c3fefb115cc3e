"""Where peers are: the instance's settings first, then the registry folder, then a template.

The first two may name a log that other machines reach: then its lease says where its instance is now. All of them are
looked at again and again, at a bounded rate, so that a peer that comes up later, or in another place, is
found without a restart. What was found once stays in use until something else is found.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator

from msgspec import Struct

from immortal.coordinator.config import ConfigError, InstanceSettings, check_instance_name
from immortal.coordinator.config.values import NAME_PLACE, is_endpoint, is_log_url
from immortal.coordinator.instances.registry import Registry, UnknownInstanceError
from immortal.coordinator.log.backend import Watching
from immortal.coordinator.log.open import place_of
from immortal.coordinator.log_url import is_in_folder
from immortal.protocol.errors import ImmortalError

LOOK_NS = 2_000_000_000  # between two looks while all is well: a few stats for each peer
LEASE_POLL_NS = 100_000_000  # while leases are watched, which tell at once where a peer has gone
FAST_POLL_NS = 200_000_000  # while a peer is unknown or not connected: far below what a return may take
UNCONNECTED_WARNING_NS = 10_000_000_000  # a peer that restarts is not worth a line
WARNING_REPEAT_NS = 60_000_000_000


class Origin(enum.StrEnum):
    """What says where a peer is."""

    SETTINGS = "settings"
    REGISTRY = "registry"
    TEMPLATE = "template"
    LEASE = "lease"


class Route(Struct, frozen=True):
    """Where a peer is, and what says so."""

    endpoint: str
    origin: Origin


class Discovery:
    """Finds the peers of one instance, as its settings and the registry folder are now."""

    def __init__(self, settings: InstanceSettings, registry: Registry) -> None:
        self._settings = settings
        self._registry = registry
        self.problem = ""  # with the settings; those before stay in use
        self.leased = LeaseWatcher()

    def read_settings(self) -> None:
        """Read the instance's settings again if they have changed."""
        try:
            self._settings = self._registry.load(self._settings.name)
            self.problem = ""
        except ImmortalError as error:
            self.problem = str(error)

    def find(self, name: str) -> Route:
        """Raises UnknownInstanceError where nothing says where ``name`` is, ConfigError where it is not readable."""
        settings = self._settings
        if name in settings.peers:
            return self._said(name, settings.peers[name])
        check_instance_name(name)
        try:
            if settings.peer_template is None or self._registry.path(name).exists():
                registered = self._registry.load(name)
                leased = self._leased(registered)
                return Route(registered.peer, Origin.REGISTRY) if leased is None else Route(leased, Origin.LEASE)
        except UnknownInstanceError as error:
            raise UnknownInstanceError(
                f"{error}; register it there, or say where it is in {self._registry.path(settings.name)}: under "
                f"[peers], or by peer_template"
            ) from None
        return Route(settings.peer_template.replace(NAME_PLACE, name), Origin.TEMPLATE)

    def _leased(self, settings: InstanceSettings) -> str | None:
        """By the lease of its log. A registry in the same database has it already."""
        copy = self._registry.copy
        if copy is None or not copy.has_log(settings.name, settings.log):
            return self.leased.endpoint(settings.log)
        found = copy.endpoint(settings.name, settings.log)
        return found if found is not None and is_endpoint(found) else None

    @property
    def is_told(self) -> bool:
        """Where a peer has gone is known here at once."""
        return self._registry.copy is not None or self.leased.is_used

    def _said(self, name: str, place: str) -> Route:
        """By [peers]: an endpoint, or the URL of a log."""
        if not is_log_url(place):
            return Route(place, Origin.SETTINGS)
        endpoint = self.leased.endpoint(place)
        if endpoint is None:
            raise UnknownInstanceError(f"nobody is known yet who writes the log of {name!r}, {place}")
        return Route(endpoint, Origin.LEASE)

    def may_be_known(self, name: str) -> bool:
        """Whether :meth:`find` is worth its while for a name that nobody knew."""
        settings = self._settings
        return name in settings.peers or settings.peer_template is not None or self._registry.path(name).exists()


class _Called(Struct):
    """One destination."""

    route: Route | None = None
    problem: str = ""  # why there is no route
    unconnected_since_ns: int | None = None
    told_ns: int | None = None  # when a warning was last given


class Routes:
    """The destinations that an instance calls, and where each was found. Clocks are monotonic, in ns."""

    def __init__(self, discovery: Discovery, warn: Callable[[str], None]) -> None:
        self._discovery = discovery
        self._warn = warn
        self._called: dict[str, _Called] = {}
        self._told_of_settings = ""
        self._next_look_ns = 0

    def add(self, name: str, now_ns: int) -> None:
        """``name`` is called from now on."""
        if name not in self._called:
            called = self._called[name] = _Called()
            self._look_up(name, called)
            self._tell(name, called, now_ns)
            self._next_look_ns = now_ns + FAST_POLL_NS

    def endpoint(self, name: str) -> str | None:
        called = self._called.get(name)
        return None if called is None or called.route is None else called.route.endpoint

    def describe(self, name: str) -> dict[str, str | None]:
        """``endpoint``, ``origin``, and the ``problem`` that keeps it from being found; None for what there is not.

        Also of a peer that is not called: where it would be.
        """
        called = self._called.get(name)
        if called is None:
            called = _Called()
            self._look_up(name, called)
        route = called.route
        return {
            "endpoint": route.endpoint if route else None,
            "origin": route.origin.value if route else None,
            "problem": called.problem or None,
        }

    def at(self, endpoint: str) -> Iterator[str]:
        """All names that were found there."""
        return (name for name, called in self._called.items() if called.route and called.route.endpoint == endpoint)

    def next_deadline_ns(self) -> int | None:
        """When :meth:`look` is to be called next; None where nobody is called."""
        return self._next_look_ns if self._called else None

    def close(self) -> None:
        self._discovery.leased.close()

    def look(self, now_ns: int, connected: Callable[[str], bool]) -> list[tuple[str, str | None]]:
        """Look again if it is time: the names that were found in another place, each with the endpoint before."""
        if not self._called or now_ns < self._next_look_ns:
            return []
        self._discovery.read_settings()
        self._tell_of_settings()
        moved: list[tuple[str, str | None]] = []
        all_well = True
        for name, called in self._called.items():
            before = self.endpoint(name)
            if before is not None or self._discovery.may_be_known(name):
                self._look_up(name, called)
            endpoint = self.endpoint(name)
            if endpoint != before:
                moved.append((name, before))
            if endpoint is not None and connected(endpoint):
                called.unconnected_since_ns = called.told_ns = None
            else:
                all_well = False
                self._tell(name, called, now_ns)
        pause_ns = LOOK_NS if all_well else FAST_POLL_NS
        self._next_look_ns = now_ns + (LEASE_POLL_NS if self._discovery.is_told else pause_ns)
        return moved

    def _look_up(self, name: str, called: _Called) -> None:
        try:
            called.route = self._discovery.find(name)
            called.problem = ""
        except UnknownInstanceError as error:
            if called.route is None:  # one that was unregistered may still be where it was
                called.problem = str(error)
        except ConfigError as error:
            called.problem = str(error)

    def _tell(self, name: str, called: _Called, now_ns: int) -> None:
        if called.unconnected_since_ns is None:
            called.unconnected_since_ns = now_ns
        if called.told_ns is not None and now_ns - called.told_ns < WARNING_REPEAT_NS:
            return
        if called.route is None:
            self._warn(f"nothing is sent to {name!r}, its calls wait: {called.problem}")
        elif now_ns - called.unconnected_since_ns >= UNCONNECTED_WARNING_NS:
            route = called.route
            silent_s = (now_ns - called.unconnected_since_ns) // 1_000_000_000
            self._warn(
                f"no connection to {name!r} at {route.endpoint} (by the {route.origin}) for {silent_s} s, its calls "
                f"wait: start it, or correct where it is"
            )
        else:
            return
        called.told_ns = now_ns

    def _tell_of_settings(self) -> None:
        problem = self._discovery.problem
        if problem and problem != self._told_of_settings:
            self._warn(f"the settings as they were stay in use: {problem}")
        self._told_of_settings = problem


# Where instances are whose logs other machines reach: as the leases of their logs say, at once when that changes.


class LeaseWatcher:
    """One watch, with a thread and a connection of its own, for each log that was asked about."""

    def __init__(self) -> None:
        self._watches: dict[str, Watching | None] = {}

    def endpoint(self, log: str) -> str | None:
        """None where it is not known: yet, or at all. It waits for nothing."""
        if is_in_folder(log):
            return None
        if log not in self._watches:
            try:
                self._watches[log] = place_of(log).watch()
            except ImmortalError:  # no driver here for it: the settings say where its instance is
                self._watches[log] = None
        watch = self._watches[log]
        found = None if watch is None else watch.endpoint
        return found if found is not None and is_endpoint(found) else None  # whoever wrote it

    @property
    def is_used(self) -> bool:
        return any(watch is not None for watch in self._watches.values())

    def close(self) -> None:
        for watch in self._watches.values():
            if watch is not None:
                watch.close(0)
