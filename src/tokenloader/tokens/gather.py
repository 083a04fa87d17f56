"""Gathering: where the windows of one token axis lie in memory, and copying them out with one numpy call.

What is mapped from files is not copied here, but by byte ranges (`store.Memory.read`). In RAM, the
windows of an axis are an array of records that overlap: each record has the bytes of one window.
Indexing that array with the windows' offsets copies a record per index with memcpy, without the GIL, into
a fresh block. Measured warm on 32 windows of 1,025 uint16: with rows of uint16 instead of records it
takes 1.5 times as long, and with `out[i] = a[s:s+n]` in a loop 3.5 times.

An axis may be made of several arrays (a file each), which lie anywhere in the process's memory. The records
go from the lowest byte of all arrays to the highest, and one begins at every byte, so that one call of
numpy reaches every window, wherever its array lies and however it is aligned:

    address    lowest                                                      highest
    memory     | array 1        |    not ours    | array 2 | array 0           |
    record 0   |<- window ->|
    record 1    |<- window ->|
    record i   |--- i bytes ------------------------------->|<- window ->|

The array of records is only an address, a count and a stride; it takes no memory, and the gaps are never
touched: records are read where a window lies within one array, and nowhere else. A window that straddles
arrays is copied array by array.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokenloader.storage.kernel_advice import Ranges

_MAX_RECORDS_BYTES = 2**62  # numpy multiplies count and size of records in 64 bits


class Located(NamedTuple):
    """Windows of equal length, and where in memory they lie."""

    length: int  # tokens in a window
    offsets: NDArray[np.int64]  # [n], bytes from the lowest address of the axis to each window's first
    stretches: NDArray[np.int64]  # [n], number of the stretch that has each window's first token
    straddling: dict[int, int]  # row and first token of each window that does not lie in one stretch


class ByteRanges(NamedTuple):
    """Ranges of memory that hold windows end to end."""

    ranges: Ranges
    stretches: NDArray[np.int64]  # [n], number of the stretch that each range lies in


class Axis:
    """Contiguous arrays of one dtype as one token axis, which keeps them alive. Does not check bounds.

    Arrays that lie end to end in memory count as one stretch, in which no window straddles: files that
    were read into RAM together are one. With joins False, each array is a stretch.
    """

    def __init__(
        self,
        arrays: Sequence[NDArray[Any]],
        *,
        joins: bool = True,
        max_records_bytes: int = _MAX_RECORDS_BYTES,
    ) -> None:
        self.dtype = arrays[0].dtype
        self._arrays = list(arrays)
        self._max_records_bytes = max_records_bytes  # past that, windows are copied row by row
        begins = np.array([array.ctypes.data for array in arrays], np.int64)
        ends = begins + [array.nbytes for array in arrays]
        breaks = np.flatnonzero((begins[1:] != ends[:-1]) | (not joins)) + 1
        begins, ends = begins[np.append(0, breaks)], ends[np.append(breaks - 1, -1)]  # of stretches
        lengths = (ends - begins) // self.dtype.itemsize
        self._stretches = list(map(self._tokens_at, begins.tolist(), lengths.tolist()))
        self._ends = lengths.cumsum()  # in tokens of the axis
        self._list_of_ends: list[int] = self._ends.tolist()  # faster for a single position
        self._lowest = int(begins.min())
        self._span_bytes = int(ends.max()) - self._lowest
        # Token i of the axis lies i * itemsize + shift bytes above the lowest address.
        self._shift_bytes = begins - self._lowest - (self._ends - lengths) * self.dtype.itemsize
        self._records: tuple[int, NDArray[np.void]] = 0, np.empty(0, np.void)

    def __len__(self) -> int:
        return self._list_of_ends[-1]

    def locate(self, starts: NDArray[np.int64], length: int) -> Located:
        """Finds the windows [starts[i], starts[i] + length) in memory. Starts may change later."""
        offsets = starts * self.dtype.itemsize
        if len(self._stretches) == 1:
            return Located(length, offsets, np.zeros(len(starts), np.int64), {})
        stretch = self._ends.searchsorted(starts, side="right")
        offsets += self._shift_bytes[stretch]
        rows = np.flatnonzero(starts + length > self._ends[stretch])
        straddling = dict(zip(rows.tolist(), starts[rows].tolist(), strict=True)) if rows.size else {}
        return Located(length, offsets, stretch, straddling)

    def byte_ranges(self, located: Located) -> ByteRanges:
        """Finds the memory of windows, in order: one range each, several of those that straddle."""
        ranges = np.empty((len(located.offsets), 2), np.int64)
        ranges[:, 0] = located.offsets + self._lowest
        ranges[:, 1] = located.length * self.dtype.itemsize
        rows: list[int] = []
        more: list[tuple[int, int]] = []
        numbers: list[int] = []
        for row, start in located.straddling.items():
            first, *others = self._within_stretches(start, located.length)
            ranges[row, 1] = first.nbytes
            rows += [row + 1] * len(others)
            more += [(part.ctypes.data, part.nbytes) for part in others]
            numbers += [int(located.stretches[row]) + 1 + i for i in range(len(others))]
        if not rows:
            return ByteRanges(ranges, located.stretches)
        stretches = np.insert(located.stretches, rows, numbers)
        return ByteRanges(np.insert(ranges, rows, more, axis=0), stretches)

    def copy(self, start: int, out: NDArray[Any]) -> None:
        """Fills out, [n], with tokens [start, start + n)."""
        for part in self._within_stretches(start, len(out)):
            out[: len(part)] = part
            out = out[len(part) :]

    def gather(self, located: Located) -> NDArray[Any]:
        """Copies windows into a fresh block [n, length]."""
        length, offsets, _, straddling = located
        window_bytes = length * self.dtype.itemsize
        row_by_row = self._span_bytes * window_bytes >= self._max_records_bytes
        if not straddling and not row_by_row:
            return self._records_of(window_bytes)[offsets].view(self.dtype).reshape(-1, length)
        rows = np.empty((len(offsets), length), self.dtype)
        whole = np.delete(np.arange(len(rows)), list(straddling))
        if row_by_row:
            for row in whole.tolist():
                rows[row] = self._tokens_at(self._lowest + int(offsets[row]), length)
        elif whole.size:
            records = self._records_of(window_bytes)
            rows.view(records.dtype)[whole, 0] = records[offsets[whole]]
        for row, start in straddling.items():
            self.copy(start, rows[row])
        return rows

    def _within_stretches(self, start: int, length: int) -> Iterator[NDArray[Any]]:
        """Yields tokens [start, start + length) in order, as views that lie within a stretch each."""
        for number, within in slices_between(self._list_of_ends, start, start + length):
            yield self._stretches[number][within]

    def _records_of(self, window_bytes: int) -> NDArray[np.void]:
        held = self._records  # read once: another thread may exchange it
        if held[0] != window_bytes:
            count = max(0, self._span_bytes - window_bytes) + 1
            held = self._records = window_bytes, _array_at(self._lowest, f"V{window_bytes}", count, 1)
        return held[1]

    def _tokens_at(self, address: int, length: int) -> NDArray[Any]:
        return _array_at(address, self.dtype.str, length, self.dtype.itemsize)


def slices_between(ends: list[int], begin: int, end: int) -> Iterator[tuple[int, slice]]:
    """Yields the number of each array that has some of tokens [begin, end), and the slice of them in it."""
    number = bisect_right(ends, begin)
    while begin < end:
        first = ends[number - 1] if number else 0
        yield number, slice(begin - first, min(end, ends[number]) - first)
        begin, number = ends[number], number + 1


def _array_at(address: int, dtype: str, count: int, stride_bytes: int) -> NDArray[Any]:
    """Makes a read-only array [count] of memory that somebody else keeps alive."""
    interface = {"version": 3, "data": (address, True), "typestr": dtype}
    interface |= {"shape": (count,), "strides": (stride_bytes,)}
    return np.asarray(SimpleNamespace(__array_interface__=interface))
