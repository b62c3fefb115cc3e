"""Codec of pydantic's models (version 2): maps of fields and values. Decoding applies the model's own rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pydantic
import pydantic_core

from immortal.appsdk.types.registry import Codec


def codec_of(cls: type) -> Codec | None:
    if issubclass(cls, pydantic.BaseModel):  # a model of version 1 has another base class of that name
        return Codec(_encode, _decode, problem=_problem)
    if issubclass(cls, pydantic.AnyUrl):
        return Codec(str, _reader(cls, cls.__qualname__))
    return None


def union_codec(annotation: Any) -> Codec:
    """Return the codec of a union with models. Each value is encoded by its own type."""
    return Codec(lambda value: value, _reader(annotation, str(annotation)))


def _reader(annotation: Any, name: str) -> Callable[[Any, Any], Any]:
    validator = pydantic.TypeAdapter(annotation).validator
    return lambda _, plain: validated(validator, name, plain)


def _encode(model: pydantic.BaseModel) -> Any:
    """Encode a model by field names, without computed fields. Raises ValueError if a value does not fit its field."""
    try:
        return model.__pydantic_serializer__.to_python(model, round_trip=True, by_alias=False, warnings="error")
    except pydantic_core.PydanticSerializationError as error:
        raise ValueError(" ".join(str(error).split())) from None


def _decode(annotation: Any, plain: Any) -> Any:
    return validated(annotation.__pydantic_validator__, annotation.__qualname__, plain)


def validated(validator: Any, name: str, plain: Any) -> Any:
    """Validate a plain value. ``name``: name of its type, for messages. Raises ValueError with a text of one line.

    Fields are found by name, and also by alias, for callers that write JSON.
    """
    try:
        return validator.validate_python(plain, by_name=True, by_alias=True)
    except pydantic.ValidationError as error:
        problem = error
    try:  # a strict field accepts the text of a datetime only in JSON
        return validator.validate_json(pydantic_core.to_json(plain), by_name=True, by_alias=True)
    except (pydantic.ValidationError, ValueError):
        raise ValueError(_validation_text(name, problem)) from None


def _validation_text(name: str, error: pydantic.ValidationError) -> str:
    found = error.errors(include_url=False)
    shown = [
        f"{'.'.join(map(str, one['loc'])) or 'it'}: {one['msg']}, got `{type(one['input']).__name__}`"
        for one in found[:3]
    ]
    rest = f"; and {len(found) - 3} more" if len(found) > 3 else ""
    return f"Expected `{name}`: {'; '.join(shown)}{rest}"


def _problem(cls: Any) -> str | None:
    try:
        cls.model_rebuild()
        cls.model_json_schema()  # fails for fields that hold any object
    except pydantic.errors.PydanticUserError as error:
        return f"{cls.__qualname__}: {str(error).splitlines()[0]}"
    return None
