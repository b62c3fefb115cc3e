"""Checks the pages of an LMDB file before it is mapped, since LMDB trusts them unchecked.

LMDB's inner pages have no checksums. A flipped bit there can make rows vanish, or bring back an older page in which
every value has valid check bytes. So before a log is opened for writing, the pages of LMDB's main table and of all our
tables except the large ones are checked. Of ``records``, ``chunks`` and ``outputs`` only the outermost pages are
checked: a reader notices what is missing between them. Each page must have its own number, have the right kind and be
in no list of free pages; keys must ascend; a table must have as many rows as it counts.
"""

from __future__ import annotations

import os
import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from immortal.protocol.files import opened

PAGE_HEADER_SIZE_BYTES = 16
_PAGE_HEADER = struct.Struct("=QHHHH")  # number, padding, flags, end of the pointers, begin of the nodes
_NODE = struct.Struct("=HHHH")  # low and high half of the size, or of the child's number; flags; size of the key
_DB = struct.Struct("=IHHQQQQQ")  # padding, flags, depth, branch, leaf and overflow pages, entries, root
# Magic, version, address, map size, free list (which begins with the page size), main table, last page, transaction.
META = struct.Struct("=IIQQ48s48sQQ")
_PAGE_SIZE = struct.Struct("=I")
_META_END = struct.Struct("=QQ")  # last page, transaction
_BRANCH, _LEAF, _META_PAGE, _KINDS = 0x01, 0x02, 0x08, 0x6F
_BIG_DATA, _SUB_DATA = 0x01, 0x02
_NO_PAGE = (1 << 64) - 1
_DEPTH_MAX = 32
_MAIN_TABLES_MAX = 1024
_LARGE = frozenset({b"records", b"record_seals", b"chunks", b"outputs"})
_NUMBERED = struct.Struct(">Q")
_FREE = "free pages"


class PageError(Exception):
    """Raised for a damaged page; the text names the page and its damage."""


class Table(Struct, frozen=True):
    """LMDB's description of a table."""

    depth: int
    entries: int
    root: int

    @classmethod
    def decode(cls, data: bytes) -> Table:
        _, _, depth, _, _, _, entries, root = _DB.unpack(data)
        return cls(depth, entries, root)

    @property
    def is_empty(self) -> bool:
        return self.root == _NO_PAGE and not self.entries


class Meta(Struct, frozen=True):
    """Content of one of LMDB's two meta pages. Transaction N is written to page N % 2."""

    magic: int
    version: int
    page_size_bytes: int
    free: Table
    main: Table
    last_page: int
    transaction_id: int


class UnnamedTransaction(Struct, frozen=True):
    """Transaction with all pages synced, but whose meta page still has the ID of the transaction two before.

    LMDB leaves this state if the sync of that meta page fails. One flipped bit in the page of a durable transaction
    causes it, too. The two can't be distinguished, so the transaction counts.
    """

    transaction_id: int
    last_page: int
    meta_page: int  # its number
    page_size_bytes: int


class _Node(Struct, frozen=True):
    key: bytes
    child: int  # in a branch page
    flags: int  # in a leaf page
    size_bytes: int  # of the data, in a leaf page
    data_offset: int


def check_pages(path: Path) -> UnnamedTransaction | None:
    """Check a log's pages. Return the last transaction if its meta page names another one; None if all is right.

    Raises PageError, and OSError if the file can't be read. Only for a log that no process writes.
    """
    with opened(path, os.O_RDONLY) as descriptor:
        return _Walk(descriptor).check()


def name_transaction(path: Path, unnamed: UnnamedTransaction) -> None:
    """Write a transaction's ID into its meta page and sync it, which makes it the last one. Raises OSError."""
    with opened(path, os.O_WRONLY) as descriptor:
        named = _META_END.pack(unnamed.last_page, unnamed.transaction_id)
        offset_bytes = unnamed.meta_page * unnamed.page_size_bytes + PAGE_HEADER_SIZE_BYTES + META.size - len(named)
        if os.pwrite(descriptor, named, offset_bytes) != len(named):
            raise OSError(0, f"the meta page of transaction {unnamed.transaction_id} was not written whole")
        os.fdatasync(descriptor)


def decode_meta(data: bytes) -> Meta:
    """Decode a meta page. ``data`` begins after the page header."""
    magic, version, _, _, free, main, last_page, transaction_id = META.unpack_from(data)
    (page_size_bytes,) = _PAGE_SIZE.unpack_from(free)
    return Meta(magic, version, page_size_bytes, Table.decode(free), Table.decode(main), last_page, transaction_id)


class _Walk:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._file_size_bytes = os.fstat(descriptor).st_size
        self._page_size_bytes = decode_meta(os.pread(descriptor, META.size, PAGE_HEADER_SIZE_BYTES)).page_size_bytes
        metas = [self._meta(number) for number in range(2)]
        self._older, self._meta_page = sorted(metas, key=lambda meta: meta.transaction_id)
        self._check_metas(metas)
        self._last_page = self._meta_page.last_page
        self._seen: set[int] = set()

    def _meta(self, number: int) -> Meta:
        page = self._bytes(number, PAGE_HEADER_SIZE_BYTES + META.size)
        own_number, _, flags, _, _ = _PAGE_HEADER.unpack_from(page)
        if own_number != number or flags & _KINDS != _META_PAGE:
            raise PageError(f"page {number} is no meta page")
        return decode_meta(page[PAGE_HEADER_SIZE_BYTES:])

    def _check_metas(self, metas: list[Meta]) -> None:
        first, second = (meta.transaction_id for meta in metas)
        if (first, second) == (0, 0):
            return  # nothing was ever committed
        if metas[self._meta_page.transaction_id & 1] is not self._meta_page or abs(first - second) != 1:
            raise PageError(f"the meta pages are of transactions {first} and {second}, which cannot be")

    def _bytes(self, number: int, size_bytes: int) -> bytes:
        offset_bytes = number * self._page_size_bytes
        if offset_bytes + size_bytes > self._file_size_bytes:
            raise PageError(f"page {number} is behind the end of the file")
        return os.pread(self._descriptor, size_bytes, offset_bytes)

    def _page(self, number: int, kind: int) -> tuple[bytes, int]:
        """Read a page of a table; return it with its number of nodes."""
        if not 2 <= number <= self._last_page:
            raise PageError(f"there is no page {number}")
        if number in self._seen:
            raise PageError(f"page {number} is used twice")
        self._seen.add(number)
        page = self._bytes(number, self._page_size_bytes)
        own_number, _, flags, lower, upper = _PAGE_HEADER.unpack_from(page)
        if own_number != number or flags & _KINDS != kind:
            raise PageError(
                f"page {number} is not what it should be: it says it is page {own_number}, flags {flags:#x}"
            )
        if not PAGE_HEADER_SIZE_BYTES <= lower <= upper <= self._page_size_bytes or lower & 1:
            raise PageError(f"the bounds of page {number} are wrong")
        count = (lower - PAGE_HEADER_SIZE_BYTES) // 2
        if not count or (kind == _BRANCH and count < 2):
            raise PageError(f"page {number} has {count} nodes")
        return page, count

    def _node(self, number: int, page: bytes, index: int) -> _Node:
        (offset,) = struct.unpack_from("=H", page, PAGE_HEADER_SIZE_BYTES + 2 * index)
        upper = _PAGE_HEADER.unpack_from(page)[4]
        if not upper <= offset <= len(page) - _NODE.size:
            raise PageError(f"node {index} of page {number} is outside of it")
        low, high, flags, key_size_bytes = _NODE.unpack_from(page, offset)
        data_offset = offset + _NODE.size + key_size_bytes
        size_bytes = low | high << 16
        if data_offset > len(page):
            raise PageError(f"node {index} of page {number} has a key that is too long")
        key = page[offset + _NODE.size : data_offset]
        return _Node(key, size_bytes | flags << 32, flags, size_bytes, data_offset)

    def check(self) -> UnnamedTransaction | None:
        self._check_newest(self._meta_page)
        unnamed = self._check_older()
        if unnamed is None and self._older.last_page > self._meta_page.last_page:
            raise PageError(f"transaction {self._meta_page.transaction_id} has fewer pages than the one before it")
        return unnamed

    def _check_newest(self, meta: Meta) -> None:
        self._seen.clear()
        names = []
        for number, page, node in self._leaves(meta.main, "main"):
            names.append(node.key)
            if node.flags != _SUB_DATA or node.size_bytes != _DB.size or len(names) > _MAIN_TABLES_MAX:
                raise PageError(f"page {number} holds what is no table: {node.key!r}")
            table = Table.decode(page[node.data_offset : node.data_offset + _DB.size])
            self._check_table(node.key, table)
        used = frozenset(self._seen)
        newest = meta.transaction_id
        freed_by = 0
        for transaction_id, pages in self._free_lists(meta):
            freed_by = transaction_id
            taken = used.intersection(pages)
            if taken:
                raise PageError(f"page {min(taken)} is used, and listed as free: it is of an earlier transaction")
        if newest > 1 and freed_by != newest:  # the first one frees nothing, all others free their table of tables
            raise PageError(f"the meta page of transaction {newest} belongs to transaction {freed_by}")

    def _check_older(self) -> UnnamedTransaction | None:
        """Check the other meta page: it describes the log a transaction ago, or would if its ID were not older.

        A transaction that a crash interrupted can have overwritten its pages: then its ID counts as right.
        """
        self._seen.clear()
        older = self._older.transaction_id
        self._last_page = max(
            self._last_page, self._older.last_page, self._file_size_bytes // self._page_size_bytes - 1
        )
        try:
            free = [(number, max(pages, default=0)) for number, pages in self._free_lists(self._older)]
        except PageError:
            return None
        freed_by = free[-1][0] if free else 0
        if freed_by <= older:
            return None
        wrong = f"the meta page of transaction {older} belongs to transaction {freed_by}"
        if freed_by != older + 2:  # the one transaction that is written to this meta page next
            raise PageError(wrong)
        self._last_page = max(self._last_page, *(page for _, page in free))
        try:
            self._check_newest(replace(self._older, transaction_id=freed_by))
        except PageError as error:
            raise PageError(f"{wrong}, of which {error}") from None
        return UnnamedTransaction(freed_by, self._last_of(self._older), freed_by & 1, self._page_size_bytes)

    def _last_of(self, meta: Meta) -> int:
        """Return the last page that is used or listed as free. Failed transactions can leave pages after it.

        If a large table is damaged, which its reader will find: return the last existing page.
        """
        self._seen.clear()
        tables = [(_FREE, meta.free), ("main", meta.main)]
        last = max((max(pages, default=0) for _, pages in self._free_lists(meta)), default=0)
        self._seen.clear()
        try:
            for name, table in tables:
                for _, page, node in self._leaves(table, name):
                    if name == "main":
                        data = page[node.data_offset : node.data_offset + _DB.size]
                        tables.append((node.key.decode(errors="replace"), Table.decode(data)))
                    elif node.flags & _BIG_DATA:
                        (first,) = struct.unpack_from("=Q", page, node.data_offset)
                        more = (PAGE_HEADER_SIZE_BYTES + node.size_bytes - 1) // self._page_size_bytes
                        last = max(last, first + more)
        except PageError:
            return self._last_page
        return max(last, *self._seen)

    def _check_table(self, name: bytes, table: Table) -> None:
        shown = name.decode(errors="replace")
        if name not in _LARGE:
            for _ in self._leaves(table, shown):
                pass
            return
        if table.root == _NO_PAGE:
            if table.entries or table.depth:
                raise PageError(f"the table {shown!r} counts {table.entries} rows and has no page")
            return
        first, last = self._outermost(table, shown)
        if name == b"records" and table.entries > last - first + 1:  # fewer: a reader finds and names the gap
            raise PageError(f"the table 'records' counts {table.entries} rows, but goes from record {first} to {last}")

    def _leaves(self, table: Table, name: str) -> Iterator[tuple[int, bytes, _Node]]:
        """Yield each row of a table: number of its page, page, node. The end is reached only if all is right."""
        if table.root == _NO_PAGE:
            if table.entries or table.depth:
                raise PageError(f"the table {name!r} counts {table.entries} rows and has no page")
            return
        self._check_depth(table, name)
        count = 0
        last_key: bytes | None = None
        floor = b""
        waiting = [(table.root, table.depth, b"")]  # page, depth left, lowest allowed key
        while waiting:
            number, depth, lowest = waiting.pop()
            floor = max(floor, lowest)
            page, nodes = self._page(number, _LEAF if depth == 1 else _BRANCH)
            if depth > 1:
                children = [self._node(number, page, index) for index in range(nodes)]
                below = [(child.child, depth - 1, child.key if index else b"") for index, child in enumerate(children)]
                waiting += reversed(below)
                continue
            for index in range(nodes):
                node = self._node(number, page, index)
                size_bytes = 8 if node.flags & _BIG_DATA else node.size_bytes
                if node.data_offset + size_bytes > len(page):
                    raise PageError(f"node {index} of page {number} is longer than its page")
                if (last_key is not None and not _ascends(name, last_key, node.key)) or (
                    name != _FREE and node.key < floor
                ):
                    raise PageError(f"the keys of the table {name!r} do not ascend on page {number}")
                last_key = node.key
                count += 1
                yield number, page, node
        if count != table.entries:
            raise PageError(f"the table {name!r} counts {table.entries} rows, and has {count}")

    def _check_depth(self, table: Table, name: str) -> None:
        if not 1 <= table.depth <= _DEPTH_MAX:
            raise PageError(f"the table {name!r} says that it is {table.depth} pages deep")

    def _outermost(self, table: Table, name: str) -> tuple[int, int]:
        """Return the numbers at the start of the first and the last key; read only the outermost pages."""
        self._check_depth(table, name)
        ends = []
        for last in (False, True):
            number = table.root
            for depth in range(table.depth, 0, -1):
                self._seen.discard(number)  # the root is on both paths, and other pages can be
                page, nodes = self._page(number, _LEAF if depth == 1 else _BRANCH)
                node = self._node(number, page, nodes - 1 if last else 0)
                number = node.child
            ends.append(_NUMBERED.unpack_from(node.key)[0] if len(node.key) >= _NUMBERED.size else -1)
        return ends[0], ends[1]

    def _free_lists(self, meta: Meta) -> Iterator[tuple[int, Sequence[int]]]:
        """Yield transactions in order, each with the pages that it freed."""
        for number, page, node in self._leaves(meta.free, _FREE):
            if node.flags & _BIG_DATA:
                (at,) = struct.unpack_from("=Q", page, node.data_offset)
                if not 2 <= at <= self._last_page:
                    raise PageError(f"there is no page {at}")
                data = self._bytes(at, PAGE_HEADER_SIZE_BYTES + node.size_bytes)[PAGE_HEADER_SIZE_BYTES:]
            else:
                data = page[node.data_offset : node.data_offset + node.size_bytes]
            if len(data) < 8 or len(data) % 8 or len(data) // 8 - 1 != struct.unpack_from("=Q", data)[0]:
                raise PageError(f"the list of free pages on page {number} has the wrong length")
            yield int.from_bytes(node.key, sys.byteorder), array("Q", data)[1:]


def _ascends(name: str, key: bytes, next_key: bytes) -> bool:
    if name != _FREE:
        return key < next_key
    return int.from_bytes(key, sys.byteorder) < int.from_bytes(next_key, sys.byteorder)  # LMDB's own keys are integers
