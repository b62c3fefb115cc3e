"""What a type checker sees of C types in annotations: the Python types that they are where nothing is compiled."""

from typing import TypeAlias

Py_ssize_t: TypeAlias = int
bint: TypeAlias = bool
ulong: TypeAlias = int
p_const_uchar: TypeAlias = bytes
