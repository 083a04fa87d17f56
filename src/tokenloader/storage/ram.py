"""RAM fills: token files read into RAM by background threads.

Who owns which bytes: the memory of a RamFill is written by its threads, each byte once, and is given out
when the last byte is in; from then on nobody writes to it. If the reading is stopped before that, the
memory ends with the threads.
"""

import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from io import FileIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenloader.formats.extent import Extent
from tokenloader.storage.mapped import HeldFile

_CHUNK_BYTES = 16 << 20
_NUM_READERS = 4
_PROGRESS_AFTER_SECONDS = 3.0
# preadv2, Linux 6.14: a read drops from the page cache what it brought there, and leaves what was.
_RWF_DONTCACHE = 0x80

_Chunks = Iterator[tuple[FileIO, int, NDArray[Any]]]  # a file, an offset in it, and the bytes to fill


def read_exactly(
    file: FileIO | HeldFile, offset_bytes: int, out: NDArray[Any], dontcache_flag: int = _RWF_DONTCACHE
) -> None:
    """Fills out with the bytes of a file from an offset on. OSError if the file ends before.

    Leaves the page cache as it was where the system allows that; dontcache_flag=0 does not try.
    """
    left = memoryview(out.view(np.uint8))  # type: ignore[arg-type] # it is a buffer
    while left:
        count = _read_some(file.fileno(), left, offset_bytes, dontcache_flag)
        if not count:
            message = f"ended at byte {offset_bytes:,}, before its tokens did; has it been truncated?"
            raise OSError(errno.EIO, message, str(file.name))
        left, offset_bytes = left[count:], offset_bytes + count


class RamFill:
    """Reads extents, one after the other, into one piece of RAM, on background threads.

    Shows a progress bar when that takes more than a few seconds.

    Args:
        extents: the tokens to read, of one dtype.
        files: open handles of the extents; a path may be replaced meanwhile. Closed when the reading ends.
        read: fills an array from a file, from an offset in bytes on.

    Attributes:
        arrays: [num_tokens] of each extent, end to end in memory, once all are read; until then None.
        error: what ended the reading; None if nothing did.
    """

    def __init__(
        self,
        extents: Sequence[Extent],
        files: Sequence[FileIO],
        *,
        read: Callable[[FileIO, int, NDArray[Any]], None] = read_exactly,
        chunk_bytes: int = _CHUNK_BYTES,
        progress_after_seconds: float = _PROGRESS_AFTER_SECONDS,
    ) -> None:
        num_bytes = sum(extent.nbytes for extent in extents)
        # Private, so that it is the process's own memory; and not np.empty, for whole, huge pages.
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(AttributeError, OSError):  # Python or the kernel may not know the advice
            memory.madvise(mmap.MADV_HUGEPAGE)
        ends = np.cumsum([extent.num_tokens for extent in extents])
        arrays = np.split(np.frombuffer(memory, extents[0].dtype), ends[:-1])
        chunks = (
            (file, extent.offset_bytes + at, array.view(np.uint8)[at : at + chunk_bytes])
            for extent, file, array in zip(extents, files, arrays, strict=True)
            for at in range(0, extent.nbytes, chunk_bytes)
        )
        self.arrays: list[NDArray[Any]] | None = None
        self.error: Exception | None = None
        self._read, self._files, self._stopped = read, files, False
        self._lock = threading.Lock()  # guards the chunks and the progress bar
        from tqdm import tqdm  # which takes 25 ms, and most programs map their files

        self._progress = tqdm(
            total=num_bytes,
            desc="reading tokens into RAM",
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            delay=progress_after_seconds,
        )
        threads = [_start_thread(self._read_chunks, chunks) for _ in range(_NUM_READERS)]
        self._last_thread = _start_thread(self._finish, threads, arrays)

    def wait(self) -> None:
        """Returns when all is read, or an error or stop() has ended the reading."""
        self._last_thread.join()

    def stop(self) -> None:
        """Ends the reading soon; does not wait."""
        self._stopped = True

    def _read_chunks(self, chunks: _Chunks) -> None:
        try:
            while not self._stopped:
                with self._lock:
                    chunk = next(chunks, None)
                if chunk is None:
                    return
                self._read(*chunk)
                with self._lock:
                    self._progress.update(len(chunk[2]))
        except Exception as error:
            self.error, self._stopped = error, True

    def _finish(self, readers: list[threading.Thread], arrays: list[NDArray[Any]]) -> None:
        for reader in readers:
            reader.join()
        self._progress.close()
        for file in self._files:
            file.close()
        if not self._stopped:
            self.arrays = arrays


def _start_thread(call: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=call, args=arguments, name="tokenloader-fill", daemon=True)
    thread.start()
    return thread


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


def _read_some(descriptor: int, out: memoryview, offset: int, dontcache_flag: int) -> int:
    if not hasattr(os, "preadv"):
        data = os.pread(descriptor, len(out), offset)
        out[: len(data)] = data
        return len(data)
    if dontcache_flag:
        try:
            return os.preadv(descriptor, [out], offset, dontcache_flag)
        except NotImplementedError:  # a Python built without preadv2, as on macOS
            pass
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
    count = os.preadv(descriptor, [out], offset)
    if dontcache_flag and hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, offset, count, os.POSIX_FADV_DONTNEED)
    return count
