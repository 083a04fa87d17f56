"""Mapped files: the tokens of a file as a read-only array that the page cache backs.

The memory of a mapping ends with the last reference to its array; beside it the file is held open, to be
looked at and read whatever its path names by then.

A mapped array is not to be touched, by numpy or otherwise: where the file was truncated since, or its disk
fails, that kills the process. `tokens.store.Memory.read` copies what is needed of it.
"""

import errno
import mmap
import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenloader.formats.extent import Extent
from tokenloader.formats.identity import FileIdentity, check_unchanged, naming
from tokenloader.storage.file_systems import file_system_type, is_over_a_network
from tokenloader.storage.request_size import announced_bytes

# Before Python 3.13 each mapping holds a descriptor of its own, which nobody else can use.
_DESCRIPTORS = 1 if sys.version_info >= (3, 13) else 2


class HeldFile:
    """A file that is held open: it can be looked at and read as long as somebody refers to this.

    Attributes:
        name: its path when it was opened.
        device: a number, equal for all files of a file system.
    """

    def __init__(self, name: str, descriptor: int, identity: FileIdentity | None = None) -> None:
        """Takes over a descriptor; identity None: that of the file now."""
        self.name, self._descriptor = name, descriptor
        # At exit threads may still read.
        weakref.finalize(self, os.close, descriptor).atexit = False
        self._identity = identity or FileIdentity.of(descriptor)
        self.device = self._identity.device

    def fileno(self) -> int:
        """Returns the descriptor, for calls that do not move its position."""
        return self._descriptor

    @cached_property
    def announced_bytes(self) -> int:
        """Most bytes of the file that the kernel reads for one announcement."""
        return announced_bytes(self._descriptor)

    @cached_property
    def is_over_a_network(self) -> bool:
        """Whether reads of the file are requests to a server, or to a program."""
        return is_over_a_network(file_system_type(self._descriptor) or "")

    def check_unchanged(self) -> None:
        """Raises OSError, which says what has changed, if the file was written to since it was opened."""
        check_unchanged(self._descriptor, self.name, self._identity)


def map_read_only(extent: Extent) -> tuple[NDArray[Any], HeldFile]:
    """Maps the tokens of an extent, [num_tokens]. Takes no RAM of the process, and reads nothing yet.

    Raises what `open_file` does; OSError also where there is no address space for the file.
    """
    # Opened twice: while busy, FUSE throws away what a mapping announces of an open file that was also read
    # in order. At 10 ms a request ShuffledBlocks gave 270 windows/s after such reads; like this, 10,600.
    file, to_map = open_file(extent), open_file(extent)
    with _errors_explained(extent):
        try:
            mapped = _map(to_map.fileno())
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            num_bytes = os.fstat(file.fileno()).st_size
            message = (
                f"mapping it takes {num_bytes / 2**30:.2f} GiB of address space, which the system does "
                f"not give: raise the limit on that (ulimit -v), or on the number of mappings "
                f"(vm.max_map_count)"
            )
            raise OSError(errno.ENOMEM, message, str(extent.path)) from error
    # Windows are far apart: without this a fault reads a whole read-ahead window (128 KiB to 8 MiB)
    # to use 2 KiB of it. What is worth reading ahead is named to the kernel with start_reading.
    with suppress(AttributeError, OSError):  # an advice: the system may not have it, or not take it
        mapped.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(mapped, extent.dtype, extent.num_tokens, extent.offset_bytes), file


def open_file(extent: Extent) -> HeldFile:
    """Opens the file of an extent for reading.

    OSError if it is missing, is not what it was when its header was read, or too many files are open.
    """
    with _errors_explained(extent):
        file = HeldFile(str(extent.path), os.open(extent.path, os.O_RDONLY), extent.identity)
        file.check_unchanged()
        return file


def is_mapped(array: NDArray[Any]) -> bool:
    """Whether the memory of an array is a mapping that Python made, as of np.memmap and mmap.mmap."""
    return any(isinstance(one, mmap.mmap) for one in _owners(array))


def hold_file_under(array: NDArray[Any]) -> HeldFile | None:
    """Opens the file that an array is mapped from; None where it is not known, or may change by its owner.

    The path may name another file by now, so it is not to be read: only to be looked at.
    """
    owners = list(_owners(array))
    paths = [one.filename for one in owners if isinstance(one, np.memmap) and one.mode in ("r", "c")]
    if not paths or paths[0] is None:
        return None
    with suppress(OSError, ValueError):  # deleted meanwhile, or a mapping that does not tell its size
        # Not to wait, should it be a pipe by now.
        held = HeldFile(str(paths[0]), os.open(paths[0], os.O_RDONLY | os.O_NONBLOCK))
        if os.fstat(held.fileno()).st_size == owners[-1].size():
            return held
    return None


def _owners(array: NDArray[Any]) -> Iterator[Any]:
    """Yields an array, what it is a view of, and so on."""
    one: Any = array
    while one is not None:
        yield one
        one = one.obj if isinstance(one, memoryview) else getattr(one, "base", None)


def _map(descriptor: int) -> mmap.mmap:
    # Private, because FUSE shares no mapping of a file that it is to read directly (direct_io).
    flags, prot = mmap.MAP_PRIVATE, mmap.PROT_READ
    if sys.version_info >= (3, 13):
        return mmap.mmap(descriptor, 0, flags, prot, trackfd=False)
    return mmap.mmap(descriptor, 0, flags, prot)


@contextmanager
def _errors_explained(extent: Extent) -> Iterator[None]:
    try:
        with naming(extent.path):
            yield
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        message = (
            f"too many open files, and each mapped file counts as {_DESCRIPTORS}: raise the limit "
            f"(ulimit -n), or join the files into fewer"
        )
        raise OSError(errno.EMFILE, message, str(extent.path)) from None
