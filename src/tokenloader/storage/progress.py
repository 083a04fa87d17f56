"""Progress bars on standard error, drawn by a thread of their own.

A screen may fail (a full disk behind it, a closed pipe, none at all), or block. The work that a bar is
about only counts, and never notices.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

_REDRAW_SECONDS = 0.1
_LAST_WORD_SECONDS = 1.0  # how long close() waits for the bar to be drawn to its end


class Progress:
    """A progress bar over bytes, which appears if the work takes longer than some seconds.

    With leave=False it disappears at the end. Without total_bytes it shows what is done, and how fast.

    Attributes:
        done_bytes: what the work has done; the worker counts it.
    """

    def __init__(
        self, what: str, total_bytes: int | None, after_seconds: float, *, leave: bool = True
    ) -> None:
        self.done_bytes = 0
        self._leave = leave
        self._what, self._total_bytes, self._after_seconds = what, total_bytes, after_seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._draw, name="tokenloader-progress", daemon=True)

    def start(self) -> None:
        """Begins to wait for the moment when the bar appears."""
        with suppress(RuntimeError):  # the system gives no thread: no bar
            self._thread.start()

    def close(self) -> None:
        """Ends the bar where the work has come to."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(_LAST_WORD_SECONDS)

    def _draw(self) -> None:
        if self._after_seconds and self._ended.wait(self._after_seconds):
            return
        with suppress(Exception):  # whatever tqdm and its environment variables come up with: no bar
            from tqdm import tqdm  # which takes 25 ms

            # Redrawn in time, it needs no monitor thread as tqdm has for slow loops; and closed here, no
            # finalizer, whose errors Python prints.
            bar_class = type("Bar", (tqdm,), {"monitor_interval": 0, "__del__": lambda _: None})
            with bar_class(
                total=self._total_bytes,
                desc=self._what,
                unit="B",
                unit_scale=True,
                unit_divisor=1024,
                initial=self.done_bytes,  # what came before has no part in the speed that is shown
                dynamic_ncols=True,
                leave=self._leave,
                file=_Screen(),
            ) as bar:
                while not self._ended.wait(_REDRAW_SECONDS):
                    bar.update(self.done_bytes - bar.n)
                bar.update(self.done_bytes - bar.n)


@contextmanager
def progress_bar(what: str, total_bytes: int | None, *, shown: bool) -> Iterator[Progress]:
    """Shows a bar, if it is to be shown, at once and until the with block ends."""
    bar = Progress(what, total_bytes, after_seconds=0, leave=False)
    if shown:
        bar.start()
    try:
        yield bar
    finally:
        bar.close()


class _Screen:
    """Standard error as a file that never raises: after the first failure nothing more is written.

    It does not raise in other threads either: tqdm's monitor of other bars may redraw this one.
    """

    def __init__(self) -> None:
        self._stream = sys.stderr  # None without one: 2>&-
        # Past the buffer: what that could not write it would try again at exit, and make exit status 120.
        self._raw = getattr(getattr(self._stream, "buffer", None), "raw", None)

    def write(self, text: str) -> None:
        try:
            if self._raw is not None:
                self._raw.write(text.encode(self._stream.encoding, "replace"))
            elif self._stream is not None:
                self._stream.write(text)
                self._stream.flush()
        except Exception:
            self._raw = self._stream = None

    def flush(self) -> None:
        """Does nothing: nothing is buffered."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)  # encoding, fileno: how wide it is, and what it can show
