"""Stand-ins for an instance, whose methods call it. To a type checker they are its class."""

from __future__ import annotations

from typing import Any, TypeVar

from appsdk.client.aio import AsyncClient
from appsdk.client.connection import KEY_PREFIX
from appsdk.client.results import Method, NamedMethod, typed_method
from appsdk.client.threaded import Client
from appsdk.handlers.definition import Definition
from protocol.client import CLIENT_ID_SIZE_BYTES_MAX

KEY_SIZE_BYTES_MAX = CLIENT_ID_SIZE_BYTES_MAX - len(KEY_PREFIX)

P = TypeVar("P")


class Proxy:
    """An attribute for each handler; calls go through ``client``."""

    def __init__(
        self,
        client: Client | AsyncClient,
        definition: Definition | None,
        name: str,
        timeout_s: float | None,
        key: str | None,
        methods: dict[str, Method] | None = None,
    ) -> None:
        """``methods``: those that are known, by name; shared by all proxies that are made of each other."""
        self._immortal_parts = (client, definition, name, timeout_s, key)
        self._immortal_methods: dict[str, Method] = {} if methods is None else methods

    def __repr__(self) -> str:
        client, _, name, _, _ = self._immortal_parts
        return f"<client {client.client_id!r} of {name!r}>"

    def __getattr__(self, name: str) -> ProxyMethod:
        if name.startswith("_"):
            raise AttributeError(name)
        _, definition, *_ = self._immortal_parts
        method = self._immortal_methods.get(name)
        if method is None:
            method = NamedMethod(name) if definition is None else typed_method(definition, name)
            self._immortal_methods[name] = method

        made = ProxyMethod(self, method)
        setattr(self, name, made)
        return made


class ProxyMethod:
    """``shop.place(...)`` waits for its reply, or gives something to await; ``shop.place.fork(...)`` does not wait."""

    def __init__(self, proxy: Proxy, method: Method) -> None:
        self._client, _, _, self._timeout_s, self._key = proxy._immortal_parts
        self._method = method

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._client.call(self._method, self._method.encode(arguments, keywords), self._timeout_s, self._key)

    def fork(self, *arguments: Any, **keywords: Any) -> None:
        self._client.fork(self._method, self._method.encode(arguments, keywords), self._key)


def with_key(proxy: P, key: str) -> P:
    """``with_key(shop, "order-17").buy("book")``: one request, however often and from wherever it is made.

    The first call with ``key`` is done, and each other one gets the reply of that. Raises TypeError.
    """
    if not isinstance(key, str) or not 1 <= len(key.encode()) <= KEY_SIZE_BYTES_MAX or "\0" in key:
        raise TypeError(f"a key of 1 to {KEY_SIZE_BYTES_MAX} bytes without a zero byte was expected, not {key!r}")
    return _made_of(proxy, key=key)


def with_timeout(proxy: P, timeout: float | None) -> P:
    """The same with another timeout for each call, in seconds; None: for ever. Raises TypeError."""
    return _made_of(proxy, timeout_s=timeout)


def client_of(proxy: object) -> Client | AsyncClient:
    """What is behind a proxy. Raises TypeError."""
    return _checked(proxy)._immortal_parts[0]


def _made_of(proxy: P, **changes: Any) -> P:
    before = _checked(proxy)
    client, definition, name, timeout_s, key = before._immortal_parts
    options = {"timeout_s": timeout_s, "key": key} | changes
    made: Any = Proxy(client, definition, name, **options, methods=before._immortal_methods)
    return made  # type: ignore[no-any-return]


def _checked(proxy: object) -> Proxy:
    if not isinstance(proxy, Proxy):
        raise TypeError(f"{proxy!r}: what 'with connect(...)' gives was expected")
    return proxy
