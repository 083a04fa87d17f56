"""TokenLoader: batches in the order of a plan, on the device, ahead of the training loop.

One background thread runs the pipeline; the caller's thread takes its blocks, runs the transform
under jit, and counts what it has handed out. The two share the Prefetcher's queues, and the counters,
which each writes its own part of.
"""

from __future__ import annotations

import hashlib
import operator
import re
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import jax
import numpy as np
from jax.profiler import TraceAnnotation
from jax.sharding import Sharding
from numpy.typing import NDArray

from tokenloader.batches.batch import next_token
from tokenloader.loader.agreement import all_have_the_same
from tokenloader.loader.pipeline import Block, group_size, plan_steps, produce
from tokenloader.loader.prefetch import Prefetcher
from tokenloader.loader.sharding import is_of_all_processes, place, processes_of, under
from tokenloader.loader.stats import Counters, LoaderStats
from tokenloader.loader.transforms import jitted
from tokenloader.plans.batch_size_schedule import History, samples_at
from tokenloader.plans.plan import (
    Plan,
    ShuffledEpochs,
    check_is_plan,
    check_one_window_fits,
    end_sample,
    plan_name,
)
from tokenloader.plans.state import LoaderState, differences, from_dict
from tokenloader.tokens.token_array import TokenArray


class TokenLoader:
    """An iterator over training batches that are on the device before they are asked for.

    Nothing is read before the first `next()`; from then on a background thread keeps `prefetch`
    batches ready. The order of samples depends on plan, tokens and seq_len alone. Use it from one thread.

    A plan with an end raises StopIteration there, and a `for` over the loader afterwards makes
    another pass from the beginning.

    Args:
        tokens: from `open_tokens`. Stays open when the loader is closed.
        batch_size: rows of the global batch, over all processes, 1 or more.
        seq_len: inputs in a row, 1 or more; a window has one token more.
        plan: which windows, in which order: RandomWindows, ShuffledEpochs, SequentialWindows, or
            anything with their `starts` method (see `Plan`).
        sharding: where batches go: a jax.Device, or a jax.sharding.Sharding of [batch_size, seq_len],
            over the devices of this process or of all. It may split rows, sequences or both, each over
            one mesh axis or several, and replicates over the others. None: JAX's default device now, at
            construction.
        prefetch: batches that may wait on the device, 1 or more; 2 is double buffering. Small ones
            (256 KiB at most together) are read and sent `1 + prefetch // 2` at a time.
        transform: a traceable function from a block, integers [batch_size, seq_len + 1] on the device,
            to a pytree; run under jit when a batch is handed out. None hands out the block itself, with
            which there is no loss_mask: what SequentialWindows repeats is then for you to leave out.
            Blocks have the tokens' dtype, but int64 is narrowed to int32.
            Where the sharding splits sequences into n parts, next_token and segment_documents make batches
            split likewise; other transforms are given whole rows, gathered on the devices; and with
            None a block is [batch_size, n * (seq_len / n + 1)]: each part, and the token after it.

    With a sharding over several processes, each makes a loader with the same arguments, and takes and
    resumes the same batches: the constructor and `set_state` wait for all, and compare. Each plans,
    reads and sends only what its own devices hold; no collective and no jit runs in the background.
    After Ctrl-C on some of them alone, `set_state` on all brings them together again.

    Raises:
        TypeError, ValueError: an argument is not as described, tokens are fewer than a window, the
            plan ends before its first full batch, batch_size or seq_len does not divide over the
            sharding, or processes were given different arguments.

    Example:
        >>> tokens = tl.open_tokens(np.arange(100, dtype=np.uint16))
        >>> loader = tl.TokenLoader(tokens, batch_size=2, seq_len=4, plan=tl.SequentialWindows())
        >>> next(loader).targets
        Array([[1, 2, 3, 4],
               [5, 6, 7, 8]], dtype=int32)
    """

    def __init__(
        self,
        tokens: TokenArray,
        batch_size: int,
        seq_len: int,
        *,
        plan: Plan = ShuffledEpochs(seed=0),  # noqa: B008 (a frozen value)
        sharding: jax.Device | Sharding | None = None,
        prefetch: int = 2,
        transform: Callable[[jax.Array], Any] | None = next_token,
    ) -> None:
        of_all = is_of_all_processes(sharding)
        with all_have_the_same("arguments for TokenLoader", of_all) as given:
            if not isinstance(tokens, TokenArray):
                raise TypeError(
                    f"tokens is of type {type(tokens).__name__}; needed is a TokenArray: open_tokens(...)"
                )
            check_is_plan(plan)
            if transform is not None and not callable(transform):
                raise TypeError(
                    f"transform is of type {type(transform).__name__}; it must be callable"
                )
            self.tokens = tokens
            self.batch_size = _positive("batch_size", batch_size)
            self.seq_len = _positive("seq_len", seq_len)
            self.prefetch = _positive("prefetch", prefetch)
            self.plan = plan
            check_one_window_fits(len(tokens), self.seq_len)
            self._placement = place(sharding, self.batch_size, self.seq_len)
            self.sharding = self._placement.sharding
            self._end = end_sample(plan, len(tokens), self.seq_len, self.batch_size)
            self.transform = transform
            self._group = self._group_size()
            self._make_batches = None
            if transform is not None:
                self._make_batches = jitted(transform, self._placement, self._group)
            if of_all:
                given.update(self._given())

        self._counters = Counters()
        self._prefetcher: Prefetcher[Block] | None = None
        self._made: deque[_Made] = deque()
        self._closed = False
        self._finished = False
        self._step = self._sample = 0  # of the next batch to hand out
        self._seek(0, History(((0, self.batch_size),)))

    def __iter__(self) -> Self:
        if self._finished:
            self._seek(0, History(((0, self.batch_size),)))
        return self

    def __next__(self) -> Any:
        """The next batch: what transform makes of a block; a `Batch` by default.

        Raises:
            StopIteration: the plan has ended.
            ValueError: the loader is closed.
            Exception: what reading or transferring raised in the background, with its traceback. The
                position has not moved: calling again tries the same batch again.
        """
        if self._closed:
            raise ValueError("this TokenLoader was closed; make another, and set_state() to go on")
        if self._end is not None and self._sample >= self._end:
            self._finished = True
            self._stop_prefetching()
            raise StopIteration
        try:
            if self._made and self._made[0].sample != self._sample:
                self._stop_prefetching()  # Ctrl-C fell between a batch's making and its counting
            if not self._made:
                self._make(self._take(), waiting=False)
            made = self._made.popleft()
            if made.waiting and self._prefetcher is not None:
                self._prefetcher.release()
            if not self._made:
                self._make_if_there()
        except BaseException:
            # Also Ctrl-C: what is made so far may no longer begin at the position. Make it anew.
            self._stop_prefetching(wait=False)
            raise
        self._step, self._sample = self._step + 1, self._sample + self.batch_size
        self._counters.batches += 1
        return made.batch

    def get_state(self) -> dict[str, Any]:
        """The position after the last batch handed out, as a small JSON-able dict.

        Save it with the parameters that batch led to; `set_state` of a loader made alike then goes on
        with the batch after it. What has been prefetched does not count.

        In an Orbax checkpoint it is an item of its own, `ocp.args.JsonSave(loader.get_state())`. Code
        for get_state and set_state of Grain's iterators takes a loader as it is, except
        grain.checkpoint.CheckpointSave, which saves Grain's own iterators only: use JsonSave.
        """
        return self._state().to_dict()

    def set_state(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Moves to the position of a state, of this loader or of one made alike.

        batch_size, prefetch, sharding, residency and the split into files may differ: the samples go on
        where they stopped.

        Args:
            state: from `get_state`.
            strict: False goes on also where plan, seq_len or data differ, with a UserWarning that lists
                what does. Step and sample number are kept, and mean what this loader's plan makes of
                them: it hands out the windows that a run of its own would hand out from there on.
                window_starts of the steps before tells what such a run would have had, which is not what
                was trained on: keep the old state to look that up.

        Raises:
            ValueError: plan, seq_len or data differ and strict is True (each difference is listed); or
                it is no such state, or one of a newer release.
            TypeError: it is not a mapping.
        """
        of_all = not self.sharding.is_fully_addressable
        with all_have_the_same("states for set_state", of_all) as given:
            saved = from_dict(state)
            given.update(saved.to_dict(), strict=bool(strict))
        if found := differences(saved, self._state()):
            lines = "".join(f"\n  {line}" for line in found)
            if strict:
                raise ValueError(
                    f"this state is of another run, and going on would train on other samples:{lines}\n"
                    f"Open what the state was saved with, or begin anew without set_state; strict=False "
                    f"goes on all the same"
                )
            message = (
                f"going on from step {saved.step} of another run, as strict=False asks:{lines}"
            )
            warnings.warn(message, stacklevel=2)
        self._seek(saved.step, saved.history.changed(saved.step, self.batch_size))

    def window_starts(self, step: int) -> NDArray[np.int64]:
        """Where the windows of batch number `step` begin: int64 [batch_size], for any step, in O(1).

        Step 0 is the first of the run. Steps before a state that was resumed from have the batch_size
        they had then. It reads nothing.

        Raises:
            ValueError: step is negative or past the plan's end.
        """
        samples = samples_at(step, self._history, plan=self.plan, end=self._end)
        return self.plan.starts(samples, num_tokens=len(self.tokens), seq_len=self.seq_len)

    def window_tokens(self, step: int) -> NDArray[Any]:
        """The tokens of batch number `step`, a numpy block [batch_size, seq_len + 1]; see window_starts."""
        return self.tokens.gather(self.window_starts(step), self.seq_len + 1)

    @property
    def stats(self) -> LoaderStats:
        """A snapshot of what this loader has done since it was made."""
        counters = self._counters
        return LoaderStats(
            batches=counters.batches,
            tokens=counters.batches * self.batch_size * self.seq_len,
            wait_seconds=counters.wait_seconds,
            gather_seconds=counters.gather_seconds,
            transfer_seconds=counters.transfer_seconds,
            major_page_faults=counters.major_page_faults,
        )

    def close(self) -> None:
        """Ends the background thread and drops what was prefetched. The tokens stay open."""
        self._closed = True
        self._stop_prefetching()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _group_size(self) -> int:
        """How many steps are gathered, sent and made as one."""
        if self.transform is None or not self._placement.stacks:
            return 1
        num_processes = len(processes_of(self.sharding))
        batch_bytes = self.batch_size * (self.seq_len + 1) * self.tokens.dtype.itemsize
        return group_size(batch_bytes // num_processes, self.prefetch)

    def _given(self) -> dict[str, Any]:
        """What must be the same in all processes: the samples, and the programs they launch together."""
        order = hashlib.blake2b(
            str([device.id for device in self._placement.mesh.devices.flat]).encode(), digest_size=4
        )
        return {
            "tokens": self.tokens.fingerprint(),
            "plan": _name_of(self.plan),
            "batch_size": self.batch_size,
            "seq_len": self.seq_len,
            "prefetch": self.prefetch,
            "transform": _name_of(self.transform),
            "sharding": f"{self.sharding}, order of devices {order.hexdigest()}",
        }

    def _state(self) -> LoaderState:
        return LoaderState(
            step=self._step,
            sample=self._sample,
            history=self._history,
            seq_len=self.seq_len,
            plan=plan_name(self.plan),
            data=self.tokens.fingerprint(),
        )

    def _seek(self, step: int, history: History) -> None:
        self._stop_prefetching()
        self._history = history
        self._step, self._sample = step, history.samples_of(step).start
        self._finished = False

    def _take(self) -> Block:
        if self._prefetcher is None:
            steps = plan_steps(
                self.plan,
                len(self.tokens),
                self._placement,
                self._group,
                self._sample,
                self._end,
            )
            blocks = produce(self.tokens, steps, self._placement, self._group, self._counters)
            prefetcher = Prefetcher(blocks, self.prefetch // self._group)
            self._finalizer = weakref.finalize(self, prefetcher.stop, wait=False)
            self._finalizer.atexit = False  # the prefetcher sees to that itself
            self._prefetcher = prefetcher
        try:
            with TraceAnnotation("tokenloader.wait"):
                began = time.perf_counter()
                block = self._prefetcher.take()
                self._counters.wait_seconds += time.perf_counter() - began
            if block.sample == self._sample:
                return block
        except StopIteration:
            pass
        # Ctrl-C fell between a block's taking and its counting: begin again where the count stands.
        self._stop_prefetching()
        return self._take()

    def _make(self, block: Block, *, waiting: bool) -> None:
        """Launches the transform; does not wait for the device.

        Args:
            waiting: whether the block goes on counting as prefetched until its first batch is taken.
        """
        batches: tuple[Any, ...]
        with TraceAnnotation("tokenloader.transform"), under(self._placement.mesh):
            if self._make_batches is None:
                batches = (block.tokens,)
            elif block.new_targets is None:
                batches = self._make_batches(block.tokens)
            else:
                batches = self._make_batches(block.tokens, block.new_targets)
        self._made.extend(
            _Made(block.sample + i * self.batch_size, batches[i], waiting and i == 0)
            for i in range(block.num_steps)
        )

    def _make_if_there(self) -> None:
        """What comes after the batch to hand out, so that the device makes it while that is used."""
        # Over several processes all must launch the same in the same order, so none may look.
        if not self.sharding.is_fully_addressable or self._make_batches is None:
            return
        block = self._prefetcher.take_if_there() if self._prefetcher else None
        if block is not None:
            self._make(block, waiting=True)

    def _stop_prefetching(self, *, wait: bool = True) -> None:
        self._made.clear()
        # Let go of first: Ctrl-C during the wait must not leave a prefetcher that has ended.
        prefetcher, self._prefetcher = self._prefetcher, None
        if prefetcher is not None:
            self._finalizer.detach()
            prefetcher.stop(wait=wait)


class _Made(NamedTuple):
    """A batch whose transform is launched."""

    sample: int
    batch: Any
    waiting: bool  # its block still counts as prefetched


def _name_of(value: object) -> str:
    """The same in every process."""
    if type(value).__repr__ is not object.__repr__ and not hasattr(value, "__qualname__"):
        return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))  # a partial's shows its function's
    return getattr(value, "__qualname__", type(value).__qualname__)


def _positive(name: str, value: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(
            f"{name} is {value!r} of type {type(value).__name__}; needed is an integer of 1 or more"
        ) from None
    if number < 1:
        raise ValueError(f"{name}={number}; needed is 1 or more")
    return number
