"""TokenLoader: batches in the order of a plan, on the device, ahead of the training loop.

A loader is a cursor, a prefetcher and a transform. One background thread runs the pipeline; the caller's
thread peeks at its next block, launches the transform, pops the block and moves the cursor. The two
threads share the Prefetcher's queues, and the counters, of which each writes its own.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Generic, NamedTuple, Self, TypeVar, overload

import jax
import numpy as np
from jax.profiler import TraceAnnotation
from jax.sharding import PartitionSpec, Sharding
from numpy.typing import NDArray

from tokenloader.batches.batch import Batch, next_token
from tokenloader.loader.agreement import Agreement
from tokenloader.loader.notes import OtherProcessError
from tokenloader.loader.pipeline import Block, produce, task_in_words
from tokenloader.loader.prefetch import Prefetcher, PrefetcherStoppedError
from tokenloader.loader.setup import check_setup
from tokenloader.loader.sharding import mesh_context
from tokenloader.loader.stats import Counters, LoaderStats
from tokenloader.loader.transforms import compiled
from tokenloader.plans.cursor import BatchSizeSchedule, Cursor
from tokenloader.plans.plan import Plan
from tokenloader.plans.shuffled_epochs import ShuffledEpochs
from tokenloader.plans.state import RunState, differences, from_dict
from tokenloader.tokens.token_array import TokenArray

T = TypeVar("T")

_DEFAULT_PLAN = ShuffledEpochs(seed=0)

# How long a next() waits before it says in the log what for.
LOG_SECONDS = 60.0
_SLICE_SECONDS = 0.5  # between two looks at what other processes say
_logger = logging.getLogger("tokenloader")


class TokenLoader(Generic[T]):
    """An iterator over training batches that are on the device before they are asked for.

    No window is read before the first `next()`; from then on a background thread keeps `prefetch`
    batches ready. The order of samples depends on plan, tokens and seq_len alone. Use it from one thread.
    Where a plan has an end, a `for` over the loader afterwards makes another pass from the beginning.

    Args:
        tokens: from `open_tokens`. Stays open when the loader is closed.
        batch_size: rows of the global batch, over all processes, 1 or more.
        seq_len: inputs in a row, 1 or more; a window has one token more.
        plan: which windows, in which order: ShuffledEpochs, ShuffledBlocks, RandomWindows,
            SequentialWindows, Mixture, or a subclass of `Plan`. docs/plans.md says when to choose which.
        sharding: where batches go: a jax.Device, or a jax.sharding.Sharding of [batch_size, seq_len],
            over the devices of this process, of all, or of some. It may split rows, sequences or both, each
            over one mesh axis or several. A PartitionSpec, or a NamedSharding over an AbstractMesh, is over
            the mesh that jax.set_mesh has set at construction. None: JAX's default device then, which
            is refused where a mesh of several devices is set. A memory_kind other than the one that
            devices compute in goes with transform=None only.
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
    resumes the same batches: the constructor, `set_state` and the first `next()` after either wait for all
    of the sharding's processes, and compare what docs/processes.md says, of the tokens a sample
    (`TokenArray.fingerprint`); an error in one is raised in all. Each plans, reads and sends only what
    its own devices hold; no collective and no jit runs in the background.
    After Ctrl-C on some of them alone, `set_state` on all brings them together again.

    Raises:
        TypeError, ValueError: an argument is not as described, tokens are fewer than a window, the
            plan ends before its first full batch, batch_size or seq_len does not divide over the
            sharding, or processes were given different arguments, or are in different calls.
        RuntimeError: another process has ended or failed, instead of making the same loader.
        TimeoutError: another process does not come.
        OSError: the tokens cannot be read; 64 KiB of them are, for the `fingerprint` that states hold.

    Example:
        >>> tokens = tl.open_tokens(np.arange(100, dtype=np.uint16))
        >>> loader = tl.TokenLoader(tokens, batch_size=2, seq_len=4, plan=tl.SequentialWindows())
        >>> next(loader).targets
        Array([[1, 2, 3, 4],
               [5, 6, 7, 8]], dtype=int32)
        >>> loader
        TokenLoader(SequentialWindows(), batch_size=2, seq_len=4, step=1)
    """

    __module__ = "tokenloader"

    @overload
    def __init__(
        self: TokenLoader[Batch],
        tokens: TokenArray,
        batch_size: int,
        seq_len: int,
        *,
        plan: Plan = ...,
        sharding: jax.Device | Sharding | PartitionSpec | None = ...,
        prefetch: int = ...,
    ) -> None: ...
    @overload
    def __init__(
        self: TokenLoader[jax.Array],
        tokens: TokenArray,
        batch_size: int,
        seq_len: int,
        *,
        plan: Plan = ...,
        sharding: jax.Device | Sharding | PartitionSpec | None = ...,
        prefetch: int = ...,
        transform: None,
    ) -> None: ...
    @overload
    def __init__(
        self,
        tokens: TokenArray,
        batch_size: int,
        seq_len: int,
        *,
        plan: Plan = ...,
        sharding: jax.Device | Sharding | PartitionSpec | None = ...,
        prefetch: int = ...,
        transform: Callable[[jax.Array], T],
    ) -> None: ...
    def __init__(
        self,
        tokens: TokenArray,
        batch_size: int,
        seq_len: int,
        *,
        plan: Plan = _DEFAULT_PLAN,
        sharding: jax.Device | Sharding | PartitionSpec | None = None,
        prefetch: int = 2,
        transform: Callable[[jax.Array], Any] | None = next_token,
    ) -> None:
        self._agreement = agreement = Agreement(sharding)
        with agreement.on_arguments() as given:
            setup = check_setup(tokens, batch_size, seq_len, plan, sharding, prefetch, transform)
            self._placement, self._group_size = setup.placement, setup.group_size
            self._make_batches = None
            if transform is not None:
                self._make_batches = compiled(transform, setup.placement, setup.group_size)
            if agreement.notes is not None:
                given.update(setup.description())
        self.tokens, self.plan, self.transform = tokens, plan, transform
        self.batch_size, self.seq_len = setup.placement.batch_size, setup.placement.seq_len
        self.prefetch, self.sharding = setup.prefetch, setup.placement.sharding
        self._counters = Counters()
        self._cursor = setup.cursor
        self._prefetcher: Prefetcher[Block] | None = None
        self._made: _Made | None = None
        # Made of the next block to pop. On CPUs batches of 256x1024 take 0.75 of the time with it.
        # Several processes launch all in one order, so there none may look what is there.
        self._early: _Made | None = None
        self._launches_early = setup.placement.is_local and transform is not None
        self._closed = self._finished = False

    def __iter__(self) -> Self:
        if self._finished:
            schedule = BatchSizeSchedule.constant(self.batch_size)
            self._agreement.begin_pass()
            self._move(Cursor.at(self._cursor.plan, schedule, 0))
        return self

    def __next__(self) -> T:
        """Returns the next batch: what transform makes of a block; a `Batch` by default.

        Raises:
            StopIteration: the plan has ended.
            ValueError: the loader is closed; or, in the first call after the constructor or set_state, the
                processes of the sharding are at different positions, or in different calls.
            RuntimeError: another process of the sharding has failed, or has given this one up: the message
                names it and its error. The position has not moved.
            Exception: what reading or transferring raised in the background, with its traceback. The
                position has not moved: calling again tries the same batch again.
        """
        if self._closed:
            raise self._closed_error()
        self._agreement.raise_due()
        step = self._cursor.step
        if self._cursor.ended:
            self._finished = True
            self._stop_prefetching()
            raise StopIteration
        made = self._made
        if made is None or step >= made.step + len(made.batches):
            made = self._make(step)
        batch: T = made.batches[step - made.step]
        if self._launches_early:
            self._launch_early(step + 1)
        self._cursor = self._cursor.advance()
        made.batches[step - made.step] = None  # whoever has the batch decides how long it lives
        self._counters.batches += 1
        return batch

    def __repr__(self) -> str:
        return (
            f"TokenLoader({self.plan!r}, batch_size={self.batch_size}, seq_len={self.seq_len}, "
            f"step={self.step}{', closed' if self._closed else ''})"
        )

    @property
    def step(self) -> int:
        """Number of the next batch: as many were handed out since the run began."""
        return self._cursor.step

    def get_state(self) -> dict[str, int | str]:
        """Returns the position after the last batch handed out: a small flat dict of integers and strings.

        Save it with the parameters that batch led to; `set_state` of a loader made alike then goes on
        with the batch after it. Reads nothing: also when the tokens are closed, or their file is gone,
        there is a state to save.

        What the loader has prefetched does not count. What another iterator around it has taken ahead
        does (flax.jax_utils.prefetch_to_device, a queue of one's own). The loader makes such iterators
        needless; where there must be one, keep the state of each batch as it goes in, and save that of
        the last batch that came out::

            states = collections.deque()


            def with_states(loader):
                for batch in loader:
                    states.append(loader.get_state())
                    yield batch


            for batch in prefetch_to_device(with_states(loader), 2):
                state = states.popleft()  # goes on after this batch

        In an Orbax checkpoint it is an item of its own, `ocp.args.JsonSave(loader.get_state())`. Code
        for get_state and set_state of Grain's iterators takes a loader as it is, except
        grain.checkpoint.CheckpointSave, which saves Grain's own iterators only: use JsonSave.
        """
        data = self.tokens.fingerprint()
        return RunState.of_run(self._cursor, seq_len=self.seq_len, data=data).to_dict()

    def set_state(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Moves to the position of a state, of this loader or of one made alike.

        batch_size, prefetch, sharding, transform, residency and the split into files may differ: the
        samples go on where they stopped.

        Args:
            state: from `get_state`.
            strict: False goes on also where plan, seq_len or data differ, with a UserWarning that lists
                what does. Step and sample number are kept, and mean what this loader's plan makes of
                them: it hands out the windows that a run of its own would hand out from there on. So
                some windows are trained on a second time, and others not at all; where the weights of
                a Mixture are all that differs, the warning counts them. window_starts of the steps before
                tells what such a run would have had: keep the old state to look up what was trained on.

        Raises:
            ValueError: plan, seq_len or data (by `TokenArray.fingerprint`, a sample) differ and strict is
                True (each difference is listed); the run would have changed its batch_size more than 1,000
                times; or state is not what get_state returns, or of a newer release. TypeError if it is no
                mapping.
        """
        with self._agreement.on_state() as given:
            saved = from_dict(state)
            given.update(saved.to_dict(), strict=bool(strict))
        data = self.tokens.fingerprint()
        if found := differences(saved, self._cursor.plan, seq_len=self.seq_len, data=data):
            lines = "".join(f"\n  {line}" for line in found)
            if strict:
                raise ValueError(
                    f"this state is of another run, and going on would train on other samples:{lines}\n"
                    f"Open what the state was saved with, or begin anew without set_state; strict=False "
                    f"goes on all the same"
                )
            message = f"going on from step {saved.step} of another run, as strict=False asks:{lines}"
            warnings.warn(message, stacklevel=2)
        self._move(self._cursor.restore(saved.schedule, saved.step))

    def window_starts(self, step: int) -> NDArray[np.int64]:
        """Returns where the windows of batch number `step` begin: int64 [batch_size], in O(1) for any step.

        Steps are counted from 0 from the run's beginning; those before a state that was resumed from have
        the batch_size they had then. ValueError if step is negative or past the plan's end.
        """
        return self._cursor.window_starts(step)

    def window_tokens(self, step: int) -> NDArray[Any]:
        """Returns the tokens of batch number `step`: numpy [batch_size, seq_len + 1]; see window_starts."""
        return self.tokens.gather(self.window_starts(step), self.seq_len + 1)

    @property
    def stats(self) -> LoaderStats:
        """A snapshot of what this loader has done since it was made."""
        return self._counters.snapshot(self.batch_size * self.seq_len)

    def close(self) -> None:
        """Ends the background thread and drops what was prefetched. The tokens stay open."""
        self._closed = True
        self._stop_prefetching()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _make(self, step: int) -> _Made:
        """Takes the block that has a step, its transform launched; does not wait for the device."""
        prefetcher = self._prefetcher
        if prefetcher is None:
            blocks = produce(self.tokens, self._cursor, self._placement, self._group_size, self._counters)
            prefetcher = Prefetcher(blocks, self.prefetch // self._group_size)
            del blocks  # who keeps an error of this call would keep them, and their threads
            self._prefetcher = prefetcher
            if self._closed:  # meanwhile, by a signal handler or another thread
                self._stop_prefetching()
                raise self._closed_error()
        if self._agreement.is_due:
            self._agreement.on_position(self._cursor)
        try:
            made, self._early = self._early, None
            if made is None or made.step != step:
                block = self._wait_for(prefetcher)
                while block.step + block.num_steps <= step:  # an interrupt came before it was popped
                    prefetcher.pop()
                    block = self._wait_for(prefetcher)
                made = self._launch(block)
        except Exception as error:
            if not self._closed and not isinstance(error, OtherProcessError):
                self._agreement.tell_of_failure(step, error)
            raise
        self._made = made
        prefetcher.pop()
        self._agreement.tell_of_success()
        return made

    def _launch_early(self, step: int) -> None:
        """Launches the transform on a step's block, if it is there, while the batch before it is used."""
        prefetcher = self._prefetcher  # read once: close() may come between
        block = None if prefetcher is None else prefetcher.peek_if_there()
        if block is not None and block.step == step and self._early is None:
            with suppress(Exception):  # which comes again when the batch is asked for
                self._early = self._launch(block)

    def _launch(self, block: Block) -> _Made:
        batches: tuple[Any, ...]
        with TraceAnnotation("tokenloader.transform"), mesh_context(self._placement.mesh):
            if self._make_batches is None:
                batches = (block.tokens,)
            elif block.valid_targets is None:
                batches = self._make_batches(block.tokens)
            else:
                batches = self._make_batches(block.tokens, block.valid_targets)
        return _Made(block.step, list(batches[: block.num_steps]))

    def _wait_for(self, prefetcher: Prefetcher[Block]) -> Block:
        """Returns the next block; meanwhile listens to other processes, and says when it takes long."""
        began, logged = time.monotonic(), False
        try:
            with TraceAnnotation("tokenloader.wait"), self._counters.waiting:
                while not prefetcher.wait(_SLICE_SECONDS):
                    self._agreement.raise_due()
                    waited = time.monotonic() - began
                    if waited >= LOG_SECONDS and not logged:
                        logged, task = True, task_in_words(self._counters.task)
                        told = "next() has waited %.0f s for step %d: the background thread %s"
                        _logger.warning(told, waited, self.step, task)
                return prefetcher.peek()
        except PrefetcherStoppedError:
            raise self._closed_error() from None
        except BaseException:
            if prefetcher.ended:
                self._stop_prefetching(wait=False)  # the next call begins another here
            raise

    def _move(self, cursor: Cursor) -> None:
        self._stop_prefetching()
        self._cursor = cursor
        self._finished = False

    def _stop_prefetching(self, *, wait: bool = True) -> None:
        # Let go of first: Ctrl-C must leave no prefetcher that has ended, nor one without the batches
        # that were made of the blocks before its first.
        prefetcher, self._prefetcher = self._prefetcher, None
        self._made = self._early = None
        if prefetcher is not None:
            prefetcher.stop(wait=wait)

    def _closed_error(self) -> ValueError:
        return ValueError("this TokenLoader was closed; make another, and set_state() to go on")


class _Made(NamedTuple):
    """Batches whose transform is launched: of `step` and the steps after it. None where handed out."""

    step: int
    batches: list[Any]
