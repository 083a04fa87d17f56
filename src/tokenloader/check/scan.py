"""Scanning: one pass over all tokens in order, chunk by chunk, on several threads.

The chunks are read, not mapped: into one buffer for each thread, which stays in the processor's cache while
the chunk is looked at. On two cores, 2 GB cold from a virtual disk: 0.8 s, where a loop over slices of the
mapped file takes 1.4 s and a plain loop of reads 1.2 s; warm 0.2 s.

A buffer is its thread's, and is filled again for the thread's next chunk. So what a function finds in a
chunk must not be a view of it.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tokenloader.tokens.reader import Reader
from tokenloader.tokens.token_array import TokenArray

Found = TypeVar("Found")

SCAN_CHUNK_TOKENS = 2 << 20
_MOST_THREADS = 8


def scan(
    tokens: TokenArray, look: Callable[[NDArray[Any], int], Found], chunk_tokens: int = SCAN_CHUNK_TOKENS
) -> Iterator[tuple[int, int, Found]]:
    """Yields (start, stop, look(tokens[start:stop], start)) for each chunk, in order.

    Several threads call `look` at once. Raises OSError where a file cannot be read, or ends too early.
    """
    own = threading.local()
    workers = num_threads()
    with ExitStack() as stack:
        reader = stack.enter_context(Reader(tokens))
        pool = ThreadPoolExecutor(workers, "tokenloader-scan")
        stack.callback(pool.shutdown, wait=True, cancel_futures=True)

        def find(start: int) -> tuple[int, int, Found]:
            if not hasattr(own, "buffer"):
                own.buffer = np.empty(chunk_tokens, tokens.dtype)
            chunk = own.buffer[: len(tokens) - start]
            reader.read(start, chunk)
            return start, start + len(chunk), look(chunk, start)

        waiting: deque[Future[tuple[int, int, Found]]] = deque()
        for start in range(0, len(tokens), chunk_tokens):
            waiting.append(pool.submit(find, start))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def num_threads() -> int:
    """Number of threads for a scan: one reads while another looks, and memory is not faster by many."""
    return max(2, min(_MOST_THREADS, os.cpu_count() or 1))
