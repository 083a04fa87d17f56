"""RAM fills: token files read into RAM by background threads.

Who owns which bytes: the array of a RamFill is written by its threads, each byte once, and is given out
when the last byte is in; from then on nobody writes to it. If the reading is stopped before that, the
memory ends with the threads.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from io import FileIO
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from tokenloader.formats.extent import Extent

_CHUNK_BYTES = 16 << 20  # a call
_NUM_READERS = 4
_PROGRESS_AFTER_SECONDS = 3.0
# preadv2, Linux 6.14: a read drops from the page cache what it brought there, and leaves what was.
_RWF_DONTCACHE = 0x80


class Chunk(NamedTuple):
    """Bytes of a file to read, and where in the array they go."""

    extent: Extent
    file: FileIO
    offset_bytes: int  # in the file
    at: int  # in the array, bytes
    num_bytes: int


def read_chunk(chunk: Chunk, out: memoryview, dontcache_flag: int = _RWF_DONTCACHE) -> None:
    """Fills out, and leaves the page cache as it was where the system allows that.

    Raises:
        OSError: the file cannot be read, or ends within the chunk.
    """
    done = 0
    while done < chunk.num_bytes:
        at = chunk.offset_bytes + done
        count = _read_some(chunk.file.fileno(), out[done:], at, dontcache_flag)
        if not count:
            raise OSError(
                errno.EIO,
                f"ended at byte {at:,} while being read into RAM, before its tokens did; has it been "
                f"truncated?",
                str(chunk.extent.path),
            )
        done += count


class RamFill:
    """Reads extents, one after the other, into one array in RAM, on background threads.

    Shows a progress bar when that takes more than a few seconds.

    Args:
        extents: the tokens to read, of one dtype.
        files: open handles of the extents; a path may be replaced meanwhile. Closed when the reading ends.
        read: fills a buffer with a chunk.
        chunk_bytes: bytes in a chunk.
        progress_after_seconds: when the progress bar appears.

    Attributes:
        tokens: [num_tokens], once all are read; None before that, and after an error.
        error: what ended the reading; None if nothing did.
    """

    def __init__(
        self,
        extents: Sequence[Extent],
        files: Sequence[FileIO],
        *,
        read: Callable[[Chunk, memoryview], None] = read_chunk,
        chunk_bytes: int = _CHUNK_BYTES,
        progress_after_seconds: float = _PROGRESS_AFTER_SECONDS,
    ) -> None:
        num_bytes = sum(extent.nbytes for extent in extents)
        # Private, so that it is the process's own memory; and not np.empty, for whole, huge pages.
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # Python knows the advice, this kernel may not
                memory.madvise(mmap.MADV_HUGEPAGE)
        array = np.frombuffer(memory, extents[0].dtype)
        self.tokens: NDArray[Any] | None = None
        self.error: Exception | None = None
        self._read = read
        self._files = files
        self._stopped = False
        self._lock = threading.Lock()  # guards the fields below
        self._chunks = _chunks(extents, files, chunk_bytes)
        self._num_at_work = _NUM_READERS
        self._left_bytes = num_bytes
        self._progress = tqdm(
            total=num_bytes,
            desc="reading tokens into RAM",
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            delay=progress_after_seconds,
        )
        self._threads = [
            threading.Thread(target=self._run, args=(array,), name="tokenloader-fill", daemon=True)
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

    def _run(self, array: NDArray[Any]) -> None:
        buffer = memoryview(array.view(np.uint8))  # type: ignore[arg-type] # it is a buffer
        try:
            while not self._stopped:
                with self._lock:
                    chunk = next(self._chunks, None)
                if chunk is None:
                    return
                self._read(chunk, buffer[chunk.at : chunk.at + chunk.num_bytes])
                with self._lock:
                    self._progress.update(chunk.num_bytes)
                    self._left_bytes -= chunk.num_bytes
                    full = not self._left_bytes
                if full:
                    self._progress.close()
                    self.tokens = array
        except Exception as error:
            self.error, self._stopped = error, True
            self._progress.close()
        finally:
            with self._lock:
                self._num_at_work -= 1
                if not self._num_at_work:
                    for file in self._files:
                        file.close()


def check_it_fits(extents: Sequence[Extent], available_bytes: int | None) -> None:
    """Raises MemoryError if the tokens are larger than the memory available; None: unknown."""
    num_bytes = sum(extent.nbytes for extent in extents)
    if available_bytes is not None and num_bytes > available_bytes:
        more = f" and {len(extents) - 1} more" if len(extents) > 1 else ""
        raise MemoryError(
            f'{extents[0].path}{more}: residency="ram" needs {num_bytes / 2**30:.2f} GiB and '
            f"{available_bytes / 2**30:.2f} GiB of memory are available (control group limits included); "
            f'use residency="mmap", which needs none'
        )


def _chunks(extents: Sequence[Extent], files: Sequence[FileIO], chunk_bytes: int) -> Iterator[Chunk]:
    at = 0
    for extent, file in zip(extents, files, strict=True):
        for done in range(0, extent.nbytes, chunk_bytes):
            size = min(chunk_bytes, extent.nbytes - done)
            yield Chunk(extent, file, extent.offset_bytes + done, at + done, size)
        at += extent.nbytes


def _read_some(descriptor: int, out: memoryview, offset: int, dontcache_flag: int) -> int:
    if not hasattr(os, "preadv"):
        data = os.pread(descriptor, len(out), offset)
        out[: len(data)] = data
        return len(data)
    try:
        return os.preadv(descriptor, [out], offset, dontcache_flag)
    except NotImplementedError:  # a Python built without preadv2, as on macOS
        pass
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
    count = os.preadv(descriptor, [out], offset)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, offset, count, os.POSIX_FADV_DONTNEED)
    return count
