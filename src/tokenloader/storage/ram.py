"""RAM fills: token files read into RAM by background threads.

Who owns which bytes: the memory of a RamFill is written by its threads, each byte once, and is given out
when the last byte is in; from then on nobody writes to it. If the reading ends before that, for whatever
reason, the memory ends with the threads. So a failure is kept as text: the traceback of an exception
would keep the memory that was read into.
"""

import errno
import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenloader.formats.extent import Extent
from tokenloader.formats.quoting import printable
from tokenloader.storage.mapped import HeldFile
from tokenloader.storage.memory_limits import MemoryLimit, memory_limits
from tokenloader.storage.progress import Progress
from tokenloader.storage.reservation import Reservation

_CHUNK_BYTES = 16 << 20
_NUM_READERS = 4
_PROGRESS_AFTER_SECONDS = 3.0
# preadv2, Linux 6.14: a read drops from the page cache what it brought there, and leaves what was.
_RWF_DONTCACHE = 0x80

_Chunk = tuple[HeldFile, int, NDArray[Any]]  # a file, an offset in it, and the bytes to fill
_Failure = tuple[int, str, str]  # errno, text and path
_log = logging.getLogger("tokenloader")


def read_exactly(
    file: HeldFile, offset_bytes: int, out: NDArray[Any], dontcache_flag: int = _RWF_DONTCACHE
) -> None:
    """Fills out with the bytes of a file from an offset on. OSError if it ends before, or cannot be read.

    Leaves the page cache as it was where the system allows that; dontcache_flag=0 does not try.
    """
    left = memoryview(out.view(np.uint8))  # type: ignore[arg-type] # it is a buffer
    while left:
        try:
            count = _read_some(file.fileno(), left, offset_bytes, dontcache_flag)
        except OSError as error:
            message = f"cannot be read at byte {offset_bytes:,}: {error.strerror}; does its disk fail?"
            raise OSError(error.errno, message, file.name) from error
        if not count:
            message = f"ended at byte {offset_bytes:,}, before its tokens did; has it been truncated?"
            raise OSError(errno.EIO, message, file.name)
        left, offset_bytes = left[count:], offset_bytes + count


class RamFill:
    """Reads extents, one after the other, into one piece of RAM, on background threads.

    Shows a progress bar when that takes more than a few seconds.

    Args:
        extents: the tokens to read, of one dtype.
        files: the open file of each extent, which is let go of when the reading ends.
        read: fills an array from a file, from an offset in bytes on.
        limits: returns the limits on memory, under which it is reserved until it is filled.

    Attributes:
        arrays: [num_tokens] of each extent, end to end in memory, once all are read; until then None.
        failure: errno, text and path of the OSError that ended the reading; None if none did.

    Raises:
        MemoryError: there is less memory than the tokens have bytes, or others have reserved it.
        RuntimeError: the system gives no thread to read on.
    """

    def __init__(
        self,
        extents: Sequence[Extent],
        files: Sequence[HeldFile],
        *,
        read: Callable[[HeldFile, int, NDArray[Any]], None] = read_exactly,
        limits: Callable[[], Sequence[MemoryLimit]] = memory_limits,
        chunk_bytes: int = _CHUNK_BYTES,
        progress_after_seconds: float = _PROGRESS_AFTER_SECONDS,
    ) -> None:
        self.arrays: list[NDArray[Any]] | None = None
        self.failure: _Failure | None = None
        more = f" and {len(extents) - 1} more" if len(extents) > 1 else ""
        name = f'{printable(str(extents[0].path))}{more}: residency="ram"'
        self._read, self._files, self._stopped = read, files, False
        self._failures: dict[int, _Failure] = {}  # by number of chunk
        self._num_bytes = sum(extent.nbytes for extent in extents)
        self._progress = Progress("reading tokens into RAM", self._num_bytes, progress_after_seconds)
        self._lock = threading.Lock()  # guards what follows, and the progress that is counted
        self._reserved = Reservation(name, self._num_bytes, limits)
        self._num_running = 0
        with self._lock:  # no thread goes ahead before all are there
            try:
                self._filling = _allocate(name, extents)
                self._chunks: Iterator[tuple[int, _Chunk]] = enumerate(
                    (file, extent.offset_bytes + at, array.view(np.uint8)[at : at + chunk_bytes])
                    for extent, file, array in zip(extents, files, self._filling, strict=True)
                    for at in range(0, extent.nbytes, chunk_bytes)
                )
                self._threads = _start_threads(name, self._run)
                self._num_running = len(self._threads)
                self._progress.start()
            except BaseException:
                self._stopped = True
                self._reserved.close()
                raise

    def wait(self) -> None:
        """Returns when all is read, or a failure or stop() has ended the reading."""
        for thread in self._threads:
            thread.join()

    def stop(self) -> None:
        """Ends the reading soon; does not wait."""
        self._stopped = True

    def _run(self) -> None:
        try:
            self._read_chunks()
        finally:
            with self._lock:
                self._num_running -= 1
                is_last = self._num_running == 0
            if is_last:
                self._finish()

    def _read_chunks(self) -> None:
        while not self._stopped:
            with self._lock:
                number, chunk = next(self._chunks, (0, None))
            if chunk is None:
                return
            try:
                self._read(*chunk)
            except Exception as error:
                self._failures[number] = _failure(chunk[0], error)
                self._stopped = True
                return
            with self._lock:
                self._progress.done_bytes += len(chunk[2])
                self._reserved.taken(len(chunk[2]))

    def _finish(self) -> None:
        filled, self._filling, self._chunks = self._filling, [], iter(())
        files, self._files = self._files, ()
        is_full = self._progress.done_bytes == self._num_bytes
        for number, file in enumerate(files if is_full else ()):
            try:
                file.check_unchanged()
            except OSError as error:
                self._failures[number] = _failure(file, error)
        self._reserved.close()
        if is_full and not self._failures:
            self.arrays = filled
        del filled
        if self._failures:  # told when the memory is let go of: the first in the order of the tokens
            self.failure = _, text, path = self._failures[min(self._failures)]
            told = "%s: %s; the tokens are not read into RAM, and go on being read from the mapped files"
            _log.warning(told, printable(path), text)
        self._progress.close()


def _failure(file: HeldFile, error: Exception) -> _Failure:
    if isinstance(error, OSError) and error.errno and error.strerror:
        return error.errno, error.strerror, file.name
    return errno.EIO, f"cannot be read into RAM: {type(error).__name__}: {error}", file.name


def _allocate(name: str, extents: Sequence[Extent]) -> list[NDArray[Any]]:
    """Makes an array for each extent, end to end in one piece of memory, which ends with the last."""
    num_bytes = sum(extent.nbytes for extent in extents)
    try:
        # Private, so that it is the process's own memory; and not np.empty, for whole, huge pages.
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(
            f"{name} needs {num_bytes / 2**30:.2f} GiB, which the system does not give "
            f"({error.strerror}); raise the limit if there is one (ulimit -v), or use "
            f'residency="mmap", which needs no memory'
        ) from error
    with suppress(AttributeError, OSError):  # Python or the kernel may not know the advice
        memory.madvise(mmap.MADV_HUGEPAGE)
    ends = np.cumsum([extent.num_tokens for extent in extents])
    return np.split(np.frombuffer(memory, extents[0].dtype), ends[:-1])


def _start_threads(name: str, run: Callable[[], None]) -> list[threading.Thread]:
    """Starts as many threads as the system gives; RuntimeError if that is none."""
    threads: list[threading.Thread] = []
    try:
        for _ in range(_NUM_READERS):
            thread = threading.Thread(target=run, name="tokenloader-fill", daemon=True)
            thread.start()
            threads.append(thread)
    except RuntimeError as error:
        if not threads:
            raise RuntimeError(
                f"{name} reads on background threads, and the system gives none ({error}); raise the limit "
                f"on processes (ulimit -u, or the container's on pids), end some, or use "
                f'residency="mmap"'
            ) from error
    return threads


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
