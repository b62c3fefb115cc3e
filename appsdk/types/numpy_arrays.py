"""Codecs of numpy's arrays, which are encoded as {"dtype", "shape", "data"}, and of its scalars, encoded as numbers.

A decoded array has its own memory: it is aligned wherever it stood in its message, and the handler can write to it, as
it can after a recovery. A column-major array keeps its order ("order": "F"), since sums of floating-point numbers
depend on the layout in memory.
"""

from __future__ import annotations

import math
import typing
from typing import Any

import msgspec
import numpy as np

from immortal.appsdk.types.registry import Codec, describe_received

_KINDS = frozenset("biufcmMSU")  # np.dtype.kind: all but objects, and structures, whose gaps hold any bytes
_PADDED = frozenset("gG")  # np.longdouble: its padding holds any bytes
_SCALARS = frozenset(np.dtype(char).type for char in "?bBhHiIlLqQefd")
_ABSTRACT = frozenset(
    base
    for cls in (np.int8, np.uint8, np.float32, np.complex64, np.str_)
    for base in cls.__mro__[1:]
    if issubclass(base, np.generic)
)
_AS_TEXT = frozenset("cmM")


class _Form(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    dtype: str  # as np.dtype.str: "<f8"
    shape: list[int]
    data: bytes  # all items, without gaps
    order: typing.Literal["C", "F"] = "C"


def codec_of(cls: type) -> Codec | None:
    if cls is np.ndarray:
        return _ARRAY
    return _SCALAR if cls in _SCALARS else None


def _dtype_problem(dtype: np.dtype[Any]) -> str | None:
    if dtype.kind in _KINDS and dtype.char not in _PADDED:
        return None
    return (
        f"an array of dtype {dtype} can't be sent: use numbers, times or texts of a fixed length; for columns of "
        f"several types a pyarrow.Table"
    )


# --- arrays -----------------------------------------------------------------------------------------------------------


def _encode(array: np.ndarray[Any, Any]) -> _Form:
    if problem := _dtype_problem(array.dtype):
        raise TypeError(problem)
    is_column_major = array.flags.f_contiguous and not array.flags.c_contiguous
    flat = array.T if is_column_major else np.ascontiguousarray(array)
    # without gaps there is no copy: the encoder reads the array's own memory
    octets: Any = flat.reshape(-1).view(np.uint8) if array.nbytes else b""
    data: Any = memoryview(octets)
    return _Form(array.dtype.str, list(array.shape), data, "F" if is_column_major else "C")


def _decode(annotation: Any, plain: Any) -> np.ndarray[Any, Any]:
    scalar, dimensions_count = _annotated_form(annotation)
    if isinstance(plain, dict):
        array = _from_form(msgspec.convert(plain, _Form))
    elif isinstance(plain, list):
        array = _from_list(plain, scalar)
    else:
        raise ValueError(f"Expected `ndarray` (dtype, shape and data, or a list), got {describe_received(plain)}")
    if scalar is not None and not np.issubdtype(array.dtype, scalar):
        raise ValueError(f"Expected `ndarray` of {scalar.__name__}, got one of {array.dtype}")
    if dimensions_count is not None and array.ndim != dimensions_count:
        raise ValueError(f"Expected `ndarray` with {dimensions_count} dimensions, got one with {array.ndim}")
    return array


def _from_form(form: _Form) -> np.ndarray[Any, Any]:
    try:
        dtype = np.dtype(form.dtype)
    except (TypeError, ValueError, SyntaxError):
        raise ValueError(f"{form.dtype!r} is no dtype that numpy knows") from None
    if problem := _dtype_problem(dtype):
        raise ValueError(problem)
    if dtype.str != form.dtype or any(size < 0 for size in form.shape):
        raise ValueError(f"an array of dtype {form.dtype!r} and shape {form.shape} is none that numpy writes")
    if len(form.data) != (expected_bytes := math.prod(form.shape) * dtype.itemsize):
        raise ValueError(
            f"an array of {form.dtype} and shape {form.shape} has {expected_bytes} bytes, {len(form.data)} came"
        )
    array = np.empty(form.shape, dtype, form.order)
    if form.data:
        array[...] = np.frombuffer(form.data, dtype).reshape(form.shape, order=form.order)
    return array


def _from_list(items: list[Any], scalar: type[np.generic] | None) -> np.ndarray[Any, Any]:
    found = np.asarray(items)
    if problem := _dtype_problem(found.dtype):
        raise ValueError(f"a list of lists of the same length was expected, of one type: {problem}")
    if scalar is None or np.issubdtype(found.dtype, scalar) or scalar in _ABSTRACT:
        return found
    wanted = np.dtype(scalar)
    fits = found.size == 0 or found.dtype.kind + wanted.kind in ("ii", "iu", "uu", "ui", "if", "uf", "ff", "UM")
    if not fits:
        return found  # and the caller refuses it
    try:
        return np.asarray(items, wanted)
    except OverflowError as error:
        raise ValueError(f"Expected `ndarray` of {scalar.__name__}: {error}") from None


def _show(array: np.ndarray[Any, Any]) -> dict[str, Any]:
    values = array.astype(str) if array.dtype.kind in _AS_TEXT else array
    return {"dtype": array.dtype.str, "shape": list(array.shape), "values": values.tolist()}


def _annotated_form(annotation: Any) -> tuple[type[np.generic] | None, int | None]:
    """Return the scalar type and the number of dimensions of an annotation ``np.ndarray[shape, np.dtype[scalar]]``."""
    shape, dtype = (*typing.get_args(annotation), None, None)[:2]
    sizes = typing.get_args(shape)
    scalar = next(iter(typing.get_args(dtype)), None)
    scalar = typing.get_origin(scalar) or scalar  # np.floating[Any]
    is_scalar = isinstance(scalar, type) and issubclass(scalar, np.generic)
    return scalar if is_scalar else None, len(sizes) if sizes and Ellipsis not in sizes else None


def _problem(annotation: Any) -> str | None:
    scalar, _ = _annotated_form(annotation)
    return None if scalar is None or scalar in _ABSTRACT else _dtype_problem(np.dtype(scalar))


# --- scalars ----------------------------------------------------------------------------------------------------------


def _decode_scalar(annotation: Any, plain: Any) -> Any:
    expected: tuple[type, ...] = (int,)
    if issubclass(annotation, np.bool_):
        expected = (bool,)
    elif issubclass(annotation, np.floating):
        expected = (int, float)
    if not isinstance(plain, expected) or (type(plain) is bool and bool not in expected):
        raise ValueError(f"Expected `{annotation.__name__}`, got {describe_received(plain)}")
    try:
        return annotation(plain)
    except OverflowError as error:
        raise ValueError(f"Expected `{annotation.__name__}`: {error}") from None


_ARRAY = Codec(_encode, _decode, _show, _problem)
_SCALAR = Codec(lambda scalar: scalar.item(), _decode_scalar)
