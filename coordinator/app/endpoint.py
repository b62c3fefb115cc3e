"""Interface between the coordinator's loop and the app (AppInterface), and its implementation by sockets."""

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
    """Interface by which the coordinator's loop serves one app at a time. Times: monotonic clock, ns."""

    last_traffic_ns: int
    """Time when a byte last went to the app or came from it."""

    @property
    def addresses(self) -> Mapping[str, str | None]:
        """Addresses at which the app listens or connects, as fields of a log line."""

    @property
    def is_handling(self) -> bool:
        """True while a handler runs in the coordinator's own thread. Signal handlers can read it."""

    @property
    def sent_bytes(self) -> int:
        """Number of bytes that the next :meth:`pop_sent_events` will report."""

    def listen(self) -> None:
        """Begin to accept the app's connection. The caller holds the lock of the log. Raises ImmortalError."""

    def become_instance(self, settings: InstanceSettings) -> None:
        """Accept apps also at the addresses of the instance ``settings``, which this follower has taken over.

        Retry each second while the former process of the instance still holds the ports.
        """

    def next_deadline_ns(self) -> int | None:
        """Return the time at which :meth:`process` must run even if no socket is ready; None for never."""

    def is_due(self, now_ns: int) -> bool:
        """Return True if :meth:`process` has work even if no socket is ready."""

    def process(self, ready: Mapping[int, int]) -> list[ev.Event]:
        """Read from the ``ready`` sockets (epoll masks by descriptor) and do what is due; return the events.

        The core must have handled all earlier events: its data for an app that is gone must not reach the next app.
        """

    def drain(self, timeout_s: float) -> None:
        """Send all waiting data to the app; block for at most ``timeout_s``."""

    def close(self) -> None: ...


REOPEN_NS = 1_000_000_000


class AppEndpoint:
    """Socket endpoint of the app, one app at a time: turns its traffic into events, and the core's effects into bytes.

    Each turn calls :meth:`process` once, and :meth:`flush` after each batch of effects. The core learns of a connection
    only after it was authenticated, unless the settings say ``app_auth = "none"``. The app's sockets are registered
    with ``epoll``; all others share one descriptor there (an epoll of their own), so that no turn checks each of them.
    """

    def __init__(self, settings: InstanceSettings, log: Notices, epoll: select.epoll) -> None:
        self._settings = settings
        self._log = log
        self._epoll = epoll
        self._accept_epoll = select.epoll()
        self._accept_due_ns: int | None = None  # result of the last next_deadline_ns()
        epoll.register(self._accept_epoll.fileno(), select.EPOLLIN)
        self._listeners = [AppListener(settings, log, self._accept_epoll)]
        self._secret = b""
        self._instance: InstanceSettings | None = None  # instance that this follower has taken over
        self._reopen_due_ns: int | None = None  # time of the next try to listen at its addresses
        self._authenticator: AppAuthenticator | None = None
        self._app: AppConnection | None = None
        self._interest: dict[int, int] = {}
        self._interest_for = (False, False, False)  # state that _interest was made for: paused, has waiting, closing
        self.sent_bytes = 0  # handed to the socket, and not yet reported by pop_sent_events()
        self._paused = False
        self.last_traffic_ns = time.monotonic_ns()
        self.is_handling = False  # handlers run in another process

    def listen(self) -> None:
        """Write a new secret, then begin to accept the app's connection. The caller holds the lock of the log.

        Raises AppListenError, AppSecretError.
        """
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
            # Before anybody can connect: an app that has connected must find this secret.
            self._secret = secret = app_secret.create(settings.folder)
            allow_secret = settings.app_auth is AppAuth.SECRET
            self._authenticator = AppAuthenticator(
                settings.name, secret, self._log, self._accept_epoll, allow_secret=allow_secret
            )
        self._listeners[0].listen()

    def become_instance(self, settings: InstanceSettings) -> None:
        self._instance = settings
        self._open_instance_listener(time.monotonic_ns())

    def _open_instance_listener(self, now_ns: int) -> None:
        settings = self._instance
        if settings is None:
            return
        listener = AppListener(settings, self._log, self._accept_epoll)
        try:
            if self._secret:
                app_secret.write(settings.folder, self._secret)
            listener.listen()
        except ImmortalError as error:
            listener.close()
            if self._reopen_due_ns is None:
                self._log.warning(f"{error}; it is tried again each second, and the app that is connected works on")
            self._reopen_due_ns = now_ns + REOPEN_NS
            return
        self._reopen_due_ns = None
        self._listeners.append(listener)

    @property
    def addresses(self) -> Mapping[str, str | None]:
        settings = self._instance or self._settings
        return {
            "app": settings.app_address,
            "app_socket": settings.app_unix_address,
            "app_send": settings.app_send_address,
            "app_send_mode": settings.app_send_mode if settings.app_send_port is not None else None,
        }

    def next_deadline_ns(self) -> int | None:
        listeners_ns = [listener.next_deadline_ns() for listener in self._listeners]
        proof_ns = None if self._authenticator is None else self._authenticator.next_deadline_ns()
        self._accept_due_ns = due_ns = earliest(*listeners_ns, proof_ns, self._reopen_due_ns)
        return due_ns

    def is_due(self, now_ns: int) -> bool:
        return self._accept_due_ns is not None and now_ns >= self._accept_due_ns

    def process(self, ready: Mapping[int, int]) -> list[ev.Event]:
        events: list[ev.Event] = []
        if self._app is not None:
            events = self._app_ready(self._app, ready)
            if self._app is None:
                return events  # the next turn accepts another app, after the core has handled these
        arrivals = dict(self._accept_epoll.poll(0)) if self._accept_epoll.fileno() in ready else {}
        if arrivals or self.is_due(time.monotonic_ns()):
            events += self._accept(arrivals)
        return events

    def _accept(self, ready: Mapping[int, int]) -> list[ev.Event]:
        """Accept and authenticate new connections; return the events of an app that has connected."""
        events: list[ev.Event] = []
        authenticator = self._authenticator
        if authenticator is not None and (proven := authenticator.process(ready)) is not None:
            connection, data = proven
            events += [self._connect_app(connection), ev.AppData(data)]
        now_ns = time.monotonic_ns()
        if self._reopen_due_ns is not None and now_ns >= self._reopen_due_ns:
            self._open_instance_listener(now_ns)
        for listener in self._listeners:
            accepted = listener.process(ready, has_app=self._app is not None)
            if accepted is not None and authenticator is not None:
                authenticator.admit(accepted)
            elif accepted is not None:
                events.append(self._connect_app(accepted))
        return events

    def flush(self) -> list[ev.Event]:
        """Write as much as the socket takes now; return the resulting events."""
        app = self._app
        events: list[ev.Event] = []
        if app is None:
            return events
        if app.has_waiting:
            sent = app.flush()
            if sent:
                self.last_traffic_ns = time.monotonic_ns()
                self.sent_bytes += sent
        if app.closing and not app.has_waiting:
            events.append(self._disconnect_app(app))
        else:
            self._update_interest(app)
        return events

    def pop_sent_events(self) -> list[ev.Event]:
        """Return the event that tells the core how many bytes :meth:`flush` has sent. If the core does not wait for
        the event, the caller can deliver it with the next one."""
        sent_bytes, self.sent_bytes = self.sent_bytes, 0
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
        deadline_s = time.monotonic() + timeout_s
        app = self._app
        while app is not None and app.has_waiting and time.monotonic() < deadline_s:
            select.select([], [app.sender_fileno], [], max(0.0, deadline_s - time.monotonic()))
            app.flush()

    def close(self) -> None:
        if self._app is not None:
            self._app.close()
        if self._authenticator is not None:
            self._authenticator.close()
            for one in (self._settings, self._instance):
                if one is not None:
                    app_secret.remove(one.folder, self._secret)
        for listener in self._listeners:
            listener.close()
        self._accept_epoll.close()

    def _connect_app(self, connection: AppConnection) -> ev.Event:
        self._app = connection
        self._paused = False
        self._interest = connection.interest(reading=True)
        self._interest_for = (False, connection.has_waiting, connection.closing)
        for descriptor, mask in self._interest.items():
            self._epoll.register(descriptor, mask)
        self.last_traffic_ns = time.monotonic_ns()
        return ev.AppConnected()

    def _app_ready(self, app: AppConnection, ready: Mapping[int, int]) -> list[ev.Event]:
        received, sent = ready.get(app.receiver_fileno, 0), ready.get(app.sender_fileno, 0)
        events = self.flush() if sent & select.EPOLLOUT else []
        if self._app is not app:
            return events
        ended = False
        if received & select.EPOLLRDHUP and self._paused:
            ended = True  # its unread bytes were never accepted
        elif received & (select.EPOLLIN | GONE):
            data = app.receive()
            ended = data == b""
            if data:
                self.last_traffic_ns = time.monotonic_ns()
                events.append(ev.AppData(data))
        if app.has_two_sockets and sent & (select.EPOLLIN | GONE):
            unexpected = app.peek_sender()
            ended = ended or unexpected is not None
            if unexpected:
                what = "the app sent something on the connection that it is only sent to; both are closed"
                self._log.warning(what, kind="stray")
        if ended:
            events.append(self._disconnect_app(app))
        return events

    def _disconnect_app(self, app: AppConnection) -> ev.Event:
        for descriptor in self._interest:
            self._epoll.unregister(descriptor)
        app.close()
        self._app = None
        self.sent_bytes = 0
        return ev.AppClosed()

    def _update_interest(self, app: AppConnection) -> None:
        interest_for = (self._paused, app.has_waiting, app.closing)
        if interest_for == self._interest_for:
            return
        self._interest_for = interest_for
        interest = app.interest(reading=not self._paused)
        for descriptor, mask in interest.items():
            if mask != self._interest[descriptor]:
                self._epoll.modify(descriptor, mask)
        self._interest = interest
