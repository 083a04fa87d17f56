"""Token files in host memory: mapped, or read into RAM by background threads.

Who owns which bytes: a mapping is never written to. The array of a RamFill is written by its threads,
each byte once, and is given out only when the last byte is in; from then on nobody writes to it.
Memory ends with the last reference to its array.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from io import FileIO
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from tokenloader.formats.extent import Extent
from tokenloader.storage.memory_limits import available_bytes

_READ_BYTES = 16 << 20  # a call
_NUM_READERS = 4
_PROGRESS_AFTER_SECONDS = 3.0
# preadv2, Linux 6.14: a read drops from the page cache what it brought there, and leaves what was.
_RWF_DONTCACHE = 0x80


def map_read_only(extent: Extent, file: FileIO | None = None) -> NDArray[Any]:
    """The tokens of an extent, [num_tokens], backed by the page cache.

    Takes no RAM of the process's own, and reads nothing yet.

    Args:
        file: the extent's, if it is open already.
    """
    with (
        nullcontext(file) if file else open_file(extent) as opened,
        _too_many_files_explained(extent),
    ):
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    # Windows are far apart: without this a fault reads a whole read-ahead window (128 KiB to 8 MiB)
    # to use 2 KiB of it. What is worth reading ahead is named to the kernel with start_reading.
    if hasattr(mmap, "MADV_RANDOM"):
        mapped.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(mapped, extent.dtype, extent.num_tokens, extent.offset_bytes)


def open_file(extent: Extent) -> FileIO:
    """The extent's file, for reading."""
    with _too_many_files_explained(extent):
        return open(extent.path, "rb", buffering=0)


@contextmanager
def _too_many_files_explained(extent: Extent) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        raise OSError(
            errno.EMFILE,
            "too many open files, and each mapped file counts as one: raise the limit (ulimit -n), or "
            "join the files into fewer",
            str(extent.path),
        ) from None


class RamFill:
    """Reads extents, one after the other, into one array in RAM, in the background.

    Shows a progress bar when that takes more than a few seconds.

    Args:
        extents: of one dtype.
        files: theirs, open. By then the paths may be other files'. Closed when the reading ends.
        when_full: called once with the tokens, [num_tokens], on a background thread; never after an
            error or stop().

    Attributes:
        error: what went wrong, or None.
    """

    def __init__(
        self,
        extents: Sequence[Extent],
        files: Sequence[FileIO],
        when_full: Callable[[NDArray[Any]], object],
    ) -> None:
        num_bytes = sum(extent.nbytes for extent in extents)
        # Private, so that it is the process's own memory; and not np.empty, for whole, huge pages.
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # Python knows the advice, this kernel may not
                memory.madvise(mmap.MADV_HUGEPAGE)
        self.error: Exception | None = None
        self._array = np.frombuffer(memory, extents[0].dtype)
        self._when_full = when_full
        self._lock = threading.Lock()  # of all below
        self._files = files
        self._chunks = _chunks(extents, files)
        self._num_at_work = _NUM_READERS
        self._left_bytes = num_bytes
        self._stopped = False
        self._progress = tqdm(
            total=num_bytes,
            desc="reading tokens into RAM",
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            delay=_PROGRESS_AFTER_SECONDS,
        )
        self._threads = [
            threading.Thread(target=self._run, name="tokenloader-fill", daemon=True)
            for _ in range(_NUM_READERS)
        ]
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        """Returns when all is read, or an error or stop() has ended the reading."""
        for thread in self._threads:
            thread.join()

    def stop(self) -> None:
        """Ends the reading soon; does not wait."""
        self._stopped = True

    def _run(self) -> None:
        buffer = memoryview(self._array.view(np.uint8))  # type: ignore[arg-type] # it is a buffer
        try:
            while not self._stopped:
                with self._lock:
                    chunk = next(self._chunks, None)
                if chunk is None:
                    return
                _read(chunk, buffer[chunk.at : chunk.at + chunk.num_bytes])
                with self._lock:
                    self._progress.update(chunk.num_bytes)
                    self._left_bytes -= chunk.num_bytes
                    full = not self._left_bytes
                if full:
                    self._progress.close()
                    self._when_full(self._array)
        except Exception as error:
            self.error, self._stopped = error, True
            self._progress.close()
        finally:
            with self._lock:
                self._num_at_work -= 1
                if not self._num_at_work:
                    for file in self._files:
                        file.close()


class _Chunk(NamedTuple):
    extent: Extent
    file: FileIO
    offset_bytes: int  # in the file
    at: int  # in the array, bytes
    num_bytes: int


def _chunks(extents: Sequence[Extent], files: Sequence[FileIO]) -> Iterator[_Chunk]:
    at = 0
    for extent, file in zip(extents, files, strict=True):
        for done in range(0, extent.nbytes, _READ_BYTES):
            size = min(_READ_BYTES, extent.nbytes - done)
            yield _Chunk(extent, file, extent.offset_bytes + done, at + done, size)
        at += extent.nbytes


def _read(chunk: _Chunk, out: memoryview) -> None:
    """Fills out, and leaves the page cache as it was where the system allows that."""
    done = 0
    while done < chunk.num_bytes:
        count = _read_some(chunk.file.fileno(), out[done:], chunk.offset_bytes + done)
        if not count:
            raise OSError(
                errno.EIO,
                f"ended at byte {chunk.offset_bytes + done:,} while being read into RAM, before its "
                f"tokens did; has it been truncated?",
                str(chunk.extent.path),
            )
        done += count


def _read_some(descriptor: int, out: memoryview, offset: int) -> int:
    if not hasattr(os, "preadv"):
        data = os.pread(descriptor, len(out), offset)
        out[: len(data)] = data
        return len(data)
    try:
        return os.preadv(descriptor, [out], offset, _RWF_DONTCACHE)
    except NotImplementedError:  # a Python built without preadv2, as on macOS
        pass
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
    count = os.preadv(descriptor, [out], offset)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, offset, count, os.POSIX_FADV_DONTNEED)
    return count


def check_it_fits(extents: Sequence[Extent]) -> None:
    """Raises MemoryError if the tokens are larger than the memory available."""
    num_bytes = sum(extent.nbytes for extent in extents)
    available = available_bytes()
    if available is not None and num_bytes > available:
        more = f" and {len(extents) - 1} more" if len(extents) > 1 else ""
        raise MemoryError(
            f'{extents[0].path}{more}: residency="ram" needs {num_bytes / 2**30:.2f} GiB and '
            f"{available / 2**30:.2f} GiB of memory are available (control group limits included); "
            f'use residency="mmap", which needs none'
        )
