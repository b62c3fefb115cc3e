"""HTTP gateway to instances: POST calls a handler, GET asks a query, and failures are problem details (RFC 9457).

`POST /shop/order` takes the arguments as JSON, an object by name or an array by position. With the header
Idempotency-Key a repeated request makes the call once. `?wait=0` answers as soon as the instance has
the call, with the address of its result. `POST /carts/ann/add` is for a key of a keyed class. A gateway keeps nothing:
it can be killed at any moment.
"""

from __future__ import annotations

import hashlib
import hmac
import inspect
import json
import typing
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from immortal.appsdk.calls.codec import resolve_hints
from immortal.appsdk.client.clients import Proxy, handle, start, with_key
from immortal.appsdk.client.errors import CallTimeout, ClientError
from immortal.appsdk.errors import UsageError
from immortal.appsdk.handlers.decorators import Handler
from immortal.appsdk.handlers.definition import Definition
from immortal.appsdk.integrations.asgi.middleware import (
    KEY_HEADER,
    KEY_SIZE_BYTES_MAX,
    Problem,
    ProblemResponse,
    RefusedRequest,
    given_key,
    problem_of_call,
    problem_of_declared,
    problem_of_misfit,
)
from immortal.appsdk.integrations.asgi.services import Service
from immortal.appsdk.state.tree import to_json, tree
from immortal.appsdk.types.personal import Personal
from immortal.appsdk.types.registry import describe_received
from immortal.protocol import decoding

BODY_SIZE_BYTES_MAX = 16 << 20  # also the limit of a call's arguments
PROBLEM_TYPES = "/problems/"
WAIT_S_MAX = 300.0
_CALLED = ("rpc", "query")
_REFERENCES = "#/components/schemas/{name}"
_PROBLEM = {
    "description": "Problem details (RFC 9457)",
    "content": {"application/problem+json": {"schema": {"type": "object"}}},
}


def gateway(services: Iterable[Service[Any]], *, token: str | None = None, title: str = "Immortal services") -> ASGIApp:
    """Return an ASGI app that serves the instances ``services``, each created with its class.

    ``token``: required in each request as ``Authorization: Bearer TOKEN``; None: no token, for a server of this
    machine alone or one that authenticates its callers itself. ``title``: of the description, `/openapi.json`. Raises
    UsageError.
    """
    instances = {}
    for one in services:
        if not isinstance(one, Service) or one._definition is None:
            raise UsageError(f"gateway([{one!r}]): Service(Class, name) was expected")
        instances[one.name] = _Instance(one, one._definition)

    async def described(request: Request) -> Response:
        return _json(openapi({name: one.definition for name, one in instances.items()}, title))

    @asynccontextmanager
    async def closing(app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            for one in instances.values():
                await one.service.close()

    routes = [Route("/openapi.json", described)]
    for front in ("/{instance}", "/{instance}/{key:path}"):  # a key may have slashes, as they are or as %2F
        routes += [
            Route(f"{front}/calls/{{call}}", _status, methods=["GET"]),
            Route(f"{front}/calls/{{call}}", _cancel, methods=["DELETE"]),
            Route(f"{front}/calls/{{call}}/result", _result, methods=["GET"]),
            Route(f"{front}/{{handler}}", _call, methods=["POST"]),
            Route(f"{front}/{{handler}}", _query, methods=["GET"]),
        ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(_Bearer, token=token)],
        exception_handlers=dict.fromkeys((RefusedRequest, ClientError, HTTPException), _failed),
        lifespan=closing,
    )
    app.state.instances = instances
    return app


class _Instance:
    """Instance with the handlers that requests can name."""

    def __init__(self, service: Service[Any], definition: Definition) -> None:
        self.service = service
        self.definition = definition
        self.handlers = public_handlers(definition)

    def proxy(self, request: Request, timeout_s: float) -> Any:
        """Return the proxy that ``request`` calls: of its key, in a keyed class. Raises RefusedRequest."""
        name, kind, given = self.service.name, self.definition.keyed, request.path_params
        if (kind is None) is ("key" in given):
            path = f"/{name}/HANDLER" if kind is None else f"/{name}/KEY/HANDLER"
            raise RefusedRequest(Problem("key", 404, "The path does not fit the instance", f"{path} was expected"))
        shards = self.service._clients()
        made: Any = Proxy(shards[0], self.definition, name, timeout_s, None, shards=shards)
        if kind is None:
            return made
        try:
            return made[_parse_text(kind, given["key"])]
        except TypeError as error:
            raise RefusedRequest(problem_of_misfit(error)) from None


class _Bearer:
    """ASGI middleware: each request must have the token; if there is none, a POST must be JSON.

    A page of another site can make a browser send forms and text. The browser sends JSON only after a preflight
    request, which this server does not answer.
    """

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._token = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            request = Request(scope)
            given = request.headers.get("authorization", "").encode()
            if self._token is not None and not hmac.compare_digest(given, self._token):
                problem = Problem("unauthorized", 401, "The request has no token", "Authorization: Bearer TOKEN")
                response = ProblemResponse(problem, PROBLEM_TYPES)
                response.headers["WWW-Authenticate"] = "Bearer"
                return await response(scope, receive, send)
            media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if self._token is None and request.method == "POST" and media_type != "application/json":
                problem = Problem("media-type", 415, "The request is no JSON", "Content-Type: application/json")
                return await ProblemResponse(problem, PROBLEM_TYPES)(scope, receive, send)
        return await self._app(scope, receive, send)


# --- requests ---------------------------------------------------------------------------------------------------------


async def _call(request: Request) -> Response:
    instance, handler = _handler(request)
    arguments = _arguments(handler, await _body(request))
    wait_s = _wait_s(request, instance.service._timeout_s)
    proxy = instance.proxy(request, wait_s or instance.service._timeout_s)
    if (key := given_key(request)) is not None:
        parts = "\n".join((_path_of(request), handler.name, key))
        proxy = with_key(proxy, hashlib.blake2b(parts.encode(), digest_size=20).hexdigest())
    method = getattr(proxy, handler.name)
    if wait_s > 0:
        return _json(await _await_call(handler, lambda: method(*arguments[0], **arguments[1])))
    started = await _await_call(handler, lambda: start(method, *arguments[0], **arguments[1]))
    where = f"{request.scope.get('root_path', '')}/{_path_of(request)}/calls/{started.id}"
    return _json({"id": started.id, "status": "waiting"}, 202, {"Location": where})


def _path_of(request: Request) -> str:
    """Return the path of what a request calls: an instance, and of a keyed class the key."""
    given = request.path_params
    return "/".join(quote(given[one], safe="") for one in ("instance", "key") if one in given)


async def _query(request: Request) -> Response:
    instance, handler = _handler(request)
    if not handler.is_query:
        raise RefusedRequest(Problem("method", 405, f"{handler.name} is no query: it is called by POST"))
    hints = resolve_hints(handler.function)
    given = {name: _parse_text(hints.get(name, Any), text) for name, text in request.query_params.items()}
    asked = getattr(instance.proxy(request, instance.service._timeout_s).query, handler.name)
    return _json(await _await_call(handler, lambda: asked(**_arguments(handler, given)[1])))


async def _status(request: Request) -> Response:
    _, made = _started(request)
    status = await made.status()
    code = 404 if status == "unknown" else 200
    return _json({"id": made.id, "status": status}, code)


async def _result(request: Request) -> Response:
    instance, made = _started(request)
    handler = instance.handlers[made.id.partition(":")[0]]
    try:
        return _json(await _await_call(handler, lambda: made.result(_wait_s(request, instance.service._timeout_s))))
    except CallTimeout:
        return _json({"id": made.id, "status": "waiting"}, 202, {"Retry-After": "1"})


async def _cancel(request: Request) -> Response:
    _, made = _started(request)
    return _json({"id": made.id, "cancelled": await made.cancel("by DELETE")})


async def _await_call(handler: Handler[Any, Any], make: Any) -> Any:
    """Await a call. Raises RefusedRequest for wrong arguments and declared exceptions of the handler; ClientError."""
    try:
        made = make()
    except TypeError as error:
        raise RefusedRequest(problem_of_misfit(error)) from None
    try:
        return await made
    except tuple(handler.raises.values()) as error:
        raise RefusedRequest(problem_of_declared(error, {})) from None


def _handler(request: Request) -> tuple[_Instance, Handler[Any, Any]]:
    instance = _instance(request)
    name = request.path_params["handler"]
    handler = instance.handlers.get(name)
    if handler is None:
        known = ", ".join(sorted(instance.handlers)) or "none"
        detail = f"{instance.service.name} has no handler {name!r} (its handlers, as this server started: {known})"
        raise RefusedRequest(Problem("no-handler", 404, "There is no such handler", detail))
    return instance, handler


def _instance(request: Request) -> _Instance:
    instances: Mapping[str, _Instance] = request.app.state.instances
    name = request.path_params["instance"]
    if name not in instances:
        detail = f"no instance {name!r} is served here ({', '.join(sorted(instances)) or 'none is'})"
        raise RefusedRequest(Problem("no-instance", 404, "There is no such instance", detail))
    return instances[name]


def _started(request: Request) -> tuple[_Instance, Any]:
    instance, given = _instance(request), request.path_params["call"]
    try:
        if given.partition(":")[0] not in instance.handlers:
            raise TypeError
        return instance, handle(instance.proxy(request, instance.service._timeout_s), given)
    except (TypeError, AttributeError):
        detail = f"{given!r}: the id that the call was answered with was expected, such as order:3f2a..."
        raise RefusedRequest(Problem("no-call", 404, "There is no such call", detail)) from None


def _wait_s(request: Request, default_s: float | None) -> float:
    """Return the time to wait for the result: `?wait=S`, or the header `Prefer: wait=S`."""
    given = request.query_params.get("wait")
    if given is None:
        preferences = [one.strip() for one in request.headers.get("prefer", "").split(",")]
        given = next((one.partition("=")[2] for one in preferences if one.startswith("wait=")), None)
        given = "0" if given is None and "respond-async" in preferences else given
    if given is None:
        return default_s or WAIT_S_MAX
    try:
        seconds = float(given)
        if 0 <= seconds <= WAIT_S_MAX:
            return seconds
    except ValueError:
        pass
    detail = f"wait={given}: a number of seconds from 0 to {WAIT_S_MAX:g} was expected"
    raise RefusedRequest(Problem("wait", 400, "The time to wait is none", detail))


async def _body(request: Request) -> Any:
    data = bytearray()
    try:
        async for piece in request.stream():
            data += piece
            if len(data) > BODY_SIZE_BYTES_MAX:
                raise RefusedRequest(Problem("too-large", 413, f"The body has more than {BODY_SIZE_BYTES_MAX:,} bytes"))
    except ClientDisconnect:  # nobody reads the answer; a traceback in the output would help nobody
        raise RefusedRequest(Problem("json", 400, "The body is no JSON", "the connection ended within it")) from None
    if not data:
        return {}
    try:
        body = decoding.decode_json(data)
    except decoding.DecodeError as error:
        raise RefusedRequest(Problem("json", 400, "The body is no JSON", str(error))) from None
    if not isinstance(body, dict | list):
        what = "the arguments as an object, by name, or as an array, by position, were expected"
        raise RefusedRequest(Problem("json", 400, "The body has no arguments", what))
    return body


def _arguments(handler: Handler[Any, Any], given: dict[str, Any] | list[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments, by position and by name, converted to the handler's annotations. Raises RefusedRequest."""
    hints, names = resolve_hints(handler.function), list(handler.signature.parameters)
    if isinstance(given, list):
        kinds = [hints.get(name, Any) for name in names] + [Any] * len(given)
        return [_converted(f"argument {n}", *one) for n, one in enumerate(zip(kinds, given, strict=False), 1)], {}
    return [], {name: _converted(name, hints.get(name, Any), value) for name, value in given.items()}


def _converted(name: str, kind: Any, value: Any) -> Any:
    try:
        return msgspec.convert(value, kind, dec_hook=_personal)
    except msgspec.ValidationError as error:
        raise RefusedRequest(problem_of_misfit(TypeError(f"{name}: {error}"))) from None
    except TypeError:  # JSON has no form for the type: the call reports a misfit
        return value


def _personal(kind: Any, value: Any) -> Any:
    """Make a personal value of {"subject": ..., "value": ...}. Raises ValueError for other types, which JSON lacks."""
    cls = typing.get_origin(kind) or kind
    if cls is Personal and isinstance(value, dict) and value.keys() == {"subject", "value"}:
        return Personal(**value)
    if isinstance(value, cls):
        return value
    wanted = '{"subject": the person\'s ID, "value": ...}' if cls is Personal else f"`{cls.__qualname__}`"
    raise ValueError(f"Expected {wanted}, got {describe_received(value)}")


def _parse_text(kind: Any, text: str) -> Any:
    """Convert an argument of a query from its URL text: JSON of its type, or else the text itself."""
    if kind is str:
        return text
    try:
        return decoding.decode_json(text.encode())
    except decoding.DecodeError:
        return text


# --- answers ----------------------------------------------------------------------------------------------------------


def _json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    try:
        data = msgspec.json.encode(value)
    except (TypeError, ValueError):  # keys that are arrays, integers of thousands of digits
        data = json.dumps(to_json(tree(value)), ensure_ascii=False).encode()
    return Response(data, status, headers, "application/json")


async def _failed(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        problem = Problem("request", error.status_code, str(error.detail))
    else:
        assert isinstance(error, RefusedRequest | ClientError)
        problem = error.problem if isinstance(error, RefusedRequest) else problem_of_call(error)
    return ProblemResponse(problem, PROBLEM_TYPES)


# --- the description --------------------------------------------------------------------------------------------------


def public_handlers(definition: Definition) -> dict[str, Handler[Any, Any]]:
    """Return the handlers open to requests: @rpc and @query methods whose names begin with no underscore."""
    found = (definition.objects or definition).handlers.values()
    return {one.name: one for one in found if one.decorator in _CALLED and not one.name.startswith("_")}


def openapi(definitions: Mapping[str, Definition], title: str) -> dict[str, Any]:
    """Return the OpenAPI 3.1 description of instances, by name, as plain values."""
    schemas: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for name, definition in definitions.items():
        for handler in public_handlers(definition).values():
            key = "" if definition.keyed is None else "/{key}"
            paths[f"/{name}{key}/{handler.name}"] = path = _path(name, handler, schemas)
            if key:
                said = {"name": "key", "in": "path", "required": True, "schema": _schema(definition.keyed, schemas)}
                path["parameters"] = [said]
    security = {"token": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": "1"},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": security},
        "security": [{"token": []}, {}],
    }


def _path(instance: str, handler: Handler[Any, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    hints = resolve_hints(handler.function)
    properties, required = {}, []
    for name, parameter in handler.signature.parameters.items():
        properties[name] = _schema(hints.get(name, Any), schemas)
        if parameter.default is inspect.Parameter.empty:
            required.append(name)
    said = inspect.getdoc(handler.function) or handler.name
    result = _schema(hints.get("return", Any), schemas)
    operation = {
        "operationId": f"{instance}_{handler.name}",
        "summary": said.partition("\n")[0],
        "tags": [instance],
        "responses": {
            "200": {"description": "What it returns", "content": {"application/json": {"schema": result}}},
            "default": _PROBLEM,
        },
    }
    arguments = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    key = {"name": KEY_HEADER, "in": "header", "schema": {"type": "string", "maxLength": KEY_SIZE_BYTES_MAX}}
    wait = {"name": "wait", "in": "query", "schema": {"type": "number", "minimum": 0, "maximum": WAIT_S_MAX}}
    body = {"required": bool(required), "content": {"application/json": {"schema": arguments}}}
    later = {"202": {"description": "With wait=0: its result is at Location"}}
    path = {"post": operation | {"parameters": [key, wait], "requestBody": body}}
    path["post"]["responses"] = later | operation["responses"]  # type: ignore[operator]
    if handler.is_query:
        asked = [
            {"name": name, "in": "query", "required": name in required, "schema": schema}
            for name, schema in properties.items()
        ]
        path["get"] = operation | {"operationId": f"{instance}_get_{handler.name}", "parameters": asked}
    return path


def _schema(kind: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of a type; {} (anything) for a type without one."""
    if kind is None or kind is type(None):
        return {"type": "null"}
    try:
        (schema,), components = msgspec.json.schema_components((kind,), ref_template=_REFERENCES)
    except (TypeError, ValueError, NotImplementedError):
        return {}
    schemas.update(components)
    return schema
