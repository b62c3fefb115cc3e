"""The app as the loop sees it (AppInterface), and its implementation by sockets."""

from __future__ import annotations

import select
import time
from collections.abc import Mapping
from typing import Protocol

from immortal.coordinator.app import secret as app_secret
from immortal.coordinator.app.authenticator import AppAuthenticator
from immortal.coordinator.app.sockets import GONE, AppConnection, AppListener
from immortal.coordinator.clock import earliest
from immortal.coordinator.config import AppAuth, InstanceSettings
from immortal.coordinator.config.socket_addresses import is_loopback
from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.coordinator.driver.ports import AppPort
from immortal.coordinator.notices import Notices
from immortal.protocol.errors import ImmortalError


class AppInterface(AppPort, Protocol):
    """One app at a time. Times are on the monotonic clock."""

    moved_ns: int
    """When a byte last went to the app or came from it."""

    @property
    def where(self) -> Mapping[str, str | None]:
        """Where the app is, or where it connects: what a line of the log names."""

    @property
    def is_handling(self) -> bool:
        """A handler runs in the coordinator's own thread. From signal handlers, too."""

    @property
    def sent_bytes(self) -> int:
        """How many bytes the next :meth:`take_sent` will tell of."""

    def listen(self) -> None:
        """Let the app come. For who holds the lock of the log. Raises ImmortalError."""

    def become_instance(self, settings: InstanceSettings) -> None:
        """The follower that this app belongs to has become the instance of ``settings``: let apps come there, too."""

    def next_deadline_ns(self) -> int | None:
        """When :meth:`process` is to be called although nothing is ready."""

    def is_due(self, now_ns: int) -> bool:
        """Whether :meth:`process` has something to do although nothing is ready."""

    def process(self, ready: Mapping[int, int]) -> list[ev.Event]:
        """Take in what is ``ready`` (masks by descriptor) or due.

        The core must have handled all earlier events: what it has for an app that is gone must not reach the next.
        """

    def drain(self, timeout_s: float) -> None:
        """Let what is left reach the app. Blocks, up to ``timeout_s``."""

    def close(self) -> None: ...


# The app as the core sees it: what happens at its sockets becomes events, the core's effects go to them.


REOPEN_NS = 1_000_000_000


class AppEndpoint:
    """Serves one app at a time. Each turn calls :meth:`process` once, and :meth:`flush` behind each batch of effects.

    Unless the settings ask for no proof, the core hears of a connection once that is the app's. The app's sockets
    are registered with ``epoll``; all others behind one descriptor there, so that no turn has to look at each.
    """

    def __init__(self, settings: InstanceSettings, log: Notices, epoll: select.epoll) -> None:
        self._settings = settings
        self._log = log
        self._epoll = epoll
        self._arrivals = select.epoll()
        self._arrivals_due_ns: int | None = None  # as next_deadline_ns() has said
        epoll.register(self._arrivals.fileno(), select.EPOLLIN)
        self._listeners = [AppListener(settings, log, self._arrivals)]
        self._secret = b""
        self._instance: InstanceSettings | None = None  # where a follower that has taken over listens as well
        self._opens_ns: int | None = None  # when it tries to do so next
        self._gate: AppAuthenticator | None = None
        self._app: AppConnection | None = None
        self._interest: dict[int, int] = {}
        self._interest_for = (False, False, False)  # what it follows from: paused, something waits, closing
        self._sent_bytes = 0  # handed to the socket, and the core has not heard of it
        self._paused = False
        self.moved_ns = time.monotonic_ns()  # when a byte last went to the app or came from it
        self.is_handling = False  # another process does

    def listen(self) -> None:
        """Raises AppListenError, AppSecretError. For who holds the lock of the log: it makes a new secret."""
        settings = self._settings
        if not is_loopback(settings.app_host):
            open_to = {
                AppAuth.CHALLENGE: "though only the app gets in",
                AppAuth.SECRET: "who can then read the secret",
                AppAuth.NONE: "who need no secret",
            }[settings.app_auth]
            self._log.warning(
                f"the app's socket at {settings.app_host} is open to others than this machine, {open_to}: what goes "
                f"over it is not encrypted"
            )
        app_secret.remove(settings.folder)
        if settings.app_auth is not AppAuth.NONE:
            # Before anybody can connect: who has connected finds the right one.
            self._secret = secret = app_secret.make(settings.folder)
            takes_secret = settings.app_auth is AppAuth.SECRET
            self._gate = AppAuthenticator(settings.name, secret, self._log, self._arrivals, takes_secret=takes_secret)
        self._listeners[0].listen()

    def become_instance(self, settings: InstanceSettings) -> None:
        """Let apps come where those of the instance of ``settings`` come, too: the coordinator followed until now.

        While the process that was the instance holds the ports, it is tried again.
        """
        self._instance = settings
        self._open_instance(time.monotonic_ns())

    def _open_instance(self, now_ns: int) -> None:
        settings = self._instance
        if settings is None:
            return
        listener = AppListener(settings, self._log, self._arrivals)
        try:
            if self._secret:
                app_secret.write(settings.folder, self._secret)
            listener.listen()
        except ImmortalError as error:
            listener.close()
            if self._opens_ns is None:
                self._log.warning(f"{error}; it is tried again each second, and the app that is connected works on")
            self._opens_ns = now_ns + REOPEN_NS
            return
        self._opens_ns = None
        self._listeners.append(listener)

    @property
    def where(self) -> Mapping[str, str | None]:
        settings = self._instance or self._settings
        return {
            "app": settings.app_address,
            "app_socket": settings.app_unix_address,
            "app_send": settings.app_send_address,
            "app_send_mode": settings.app_send_mode if settings.app_send_port is not None else None,
        }

    def next_deadline_ns(self) -> int | None:
        """When :meth:`process` is to be called although nothing is ready, on the monotonic clock."""
        listeners_ns = [listener.next_deadline_ns() for listener in self._listeners]
        gate_ns = None if self._gate is None else self._gate.next_deadline_ns()
        self._arrivals_due_ns = due_ns = earliest(*listeners_ns, gate_ns, self._opens_ns)
        return due_ns

    def is_due(self, now_ns: int) -> bool:
        """Whether :meth:`process` has something to do although nothing is ready."""
        return self._arrivals_due_ns is not None and now_ns >= self._arrivals_due_ns

    def process(self, ready: Mapping[int, int]) -> list[ev.Event]:
        """Take in what is ``ready`` (masks by descriptor) or due.

        The core must have handled all earlier events: what it has for an app that is gone must not reach the next.
        """
        events: list[ev.Event] = []
        if self._app is not None:
            events = self._app_ready(self._app, ready)
            if self._app is None:
                return events  # the next turn accepts, when the core knows
        arrivals = dict(self._arrivals.poll(0)) if self._arrivals.fileno() in ready else {}
        if arrivals or self.is_due(time.monotonic_ns()):
            events += self._receive(arrivals)
        return events

    def _receive(self, ready: Mapping[int, int]) -> list[ev.Event]:
        """Go on with those who are not the app yet."""
        events: list[ev.Event] = []
        gate = self._gate
        if gate is not None and (proven := gate.process(ready)) is not None:
            connection, said = proven
            events += [self._take(connection), ev.AppData(said)]
        now_ns = time.monotonic_ns()
        if self._opens_ns is not None and now_ns >= self._opens_ns:
            self._open_instance(now_ns)
        for listener in self._listeners:
            arrived = listener.process(ready, taken=self._app is not None)
            if arrived is not None and gate is not None:
                gate.admit(arrived)
            elif arrived is not None:
                events.append(self._take(arrived))
        return events

    def flush(self) -> list[ev.Event]:
        """Hand to the socket what it takes now."""
        app = self._app
        events: list[ev.Event] = []
        if app is None:
            return events
        if app.has_waiting:
            sent = app.flush()
            if sent:
                self.moved_ns = time.monotonic_ns()
                self._sent_bytes += sent
        if app.closing and not app.has_waiting:
            events.append(self._lose(app))
        else:
            self._watch(app)
        return events

    @property
    def sent_bytes(self) -> int:
        """How many bytes the next :meth:`take_sent` will tell of."""
        return self._sent_bytes

    def take_sent(self) -> list[ev.Event]:
        """What the core is to hear of :meth:`flush`: with whatever comes next, if it does not wait for it."""
        sent_bytes, self._sent_bytes = self._sent_bytes, 0
        return [ev.AppSent(sent_bytes)] if sent_bytes else []

    def send(self, effect: ef.SendToApp) -> None:
        if self._app is not None and not self._app.closing:
            self._app.send(effect.data)

    def close_app(self, effect: ef.CloseApp) -> None:
        if self._app is not None:
            self._app.closing = True

    def pause(self, effect: ef.PauseApp) -> None:
        self._paused = True

    def resume(self, effect: ef.ResumeApp) -> None:
        self._paused = False

    def drain(self, timeout_s: float) -> None:
        """Let what is left reach the app. Blocks, up to ``timeout_s``."""
        deadline_s = time.monotonic() + timeout_s
        app = self._app
        while app is not None and app.has_waiting and time.monotonic() < deadline_s:
            select.select([], [app.sender_fileno], [], max(0.0, deadline_s - time.monotonic()))
            app.flush()

    def close(self) -> None:
        if self._app is not None:
            self._app.close()
        if self._gate is not None:
            self._gate.close()
            for one in (self._settings, self._instance):
                if one is not None:
                    app_secret.remove(one.folder, self._secret)
        for listener in self._listeners:
            listener.close()
        self._arrivals.close()

    def _take(self, connection: AppConnection) -> ev.Event:
        self._app = connection
        self._paused = False
        self._interest = connection.interest(reading=True)
        self._interest_for = (False, connection.has_waiting, connection.closing)
        for descriptor, mask in self._interest.items():
            self._epoll.register(descriptor, mask)
        self.moved_ns = time.monotonic_ns()
        return ev.AppConnected()

    def _app_ready(self, app: AppConnection, ready: Mapping[int, int]) -> list[ev.Event]:
        received, sent = ready.get(app.receiver_fileno, 0), ready.get(app.sender_fileno, 0)
        events = self.flush() if sent & select.EPOLLOUT else []
        if self._app is not app:
            return events
        over = False
        if received & select.EPOLLRDHUP and self._paused:
            over = True  # what it sent and was not read was not accepted either
        elif received & (select.EPOLLIN | GONE):
            data = app.receive()
            over = data == b""
            if data:
                self.moved_ns = time.monotonic_ns()
                events.append(ev.AppData(data))
        if app.has_two_sockets and sent & (select.EPOLLIN | GONE):
            stray = app.peek_sender()
            over = over or stray is not None
            if stray:
                what = "the app sent something on the connection that it is only sent to; both are closed"
                self._log.warning(what, kind="stray")
        if over:
            events.append(self._lose(app))
        return events

    def _lose(self, app: AppConnection) -> ev.Event:
        for descriptor in self._interest:
            self._epoll.unregister(descriptor)
        app.close()
        self._app = None
        self._sent_bytes = 0
        return ev.AppClosed()

    def _watch(self, app: AppConnection) -> None:
        interest_for = (self._paused, app.has_waiting, app.closing)
        if interest_for == self._interest_for:
            return
        self._interest_for = interest_for
        interest = app.interest(reading=not self._paused)
        for descriptor, mask in interest.items():
            if mask != self._interest[descriptor]:
                self._epoll.modify(descriptor, mask)
        self._interest = interest
