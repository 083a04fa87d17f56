"""LoaderSetup: the arguments of a loader, checked, and what its processes compare of them."""

import hashlib
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec, Sharding

from tokenloader.loader.groups import group_size
from tokenloader.loader.sharding import Placement, processes_of, resolve_sharding
from tokenloader.loader.shared_reads import warn_of_shared_reads
from tokenloader.loader.transform_names import transform_names
from tokenloader.plans.contents import named_plan
from tokenloader.plans.cursor import Cursor, probe
from tokenloader.plans.plan import Plan, checked_plan
from tokenloader.tokens.token_array import TokenArray

# Processes compare the windows of so many samples before the run begins.
_PROBED_SAMPLES = 1 << 20


@dataclass(frozen=True)
class LoaderSetup:
    """What a loader was given, checked, and what follows from it."""

    tokens: TokenArray
    prefetch: int
    transform: Callable[[jax.Array], Any] | None
    cursor: Cursor  # at the beginning of the run
    placement: Placement
    group_size: int  # steps that are gathered, sent and made as one

    def description(self) -> dict[str, Any]:
        """Returns what must be equal in all processes: the samples, and the programs launched together."""
        plan = self.cursor.plan
        order = str([device.id for device in self.placement.mesh.devices.flat]).encode()
        digest = hashlib.blake2b(order, digest_size=4).hexdigest()
        return {
            "tokens": self.tokens.fingerprint(),
            "plan": plan.key(0),
            "windows of the plan": probe(plan, min(_PROBED_SAMPLES, plan.num_samples or _PROBED_SAMPLES)),
            "end of the plan": None if plan.num_samples is None else int(plan.num_samples),
            "batch_size": self.placement.batch_size,
            "seq_len": self.placement.seq_len,
            "prefetch": self.prefetch,
            **transform_names(self.transform),
            "sharding": f"{self.placement.sharding}, order of devices {digest}",
        }


def check_setup(
    tokens: TokenArray,
    batch_size: int,
    seq_len: int,
    plan: Plan,
    sharding: jax.Device | Sharding | PartitionSpec | None,
    prefetch: int,
    transform: Callable[[jax.Array], Any] | None,
) -> LoaderSetup:
    """Checks the arguments of a `TokenLoader`. Raises as described there."""
    if not isinstance(tokens, TokenArray):
        raise TypeError(
            f"tokens is of type {type(tokens).__name__}; expected a TokenArray: open_tokens(...)"
        )
    checked_plan(plan)
    if transform is not None and not callable(transform):
        raise TypeError(f"transform is of type {type(transform).__name__}; expected a callable, or None")
    batch_size, seq_len = _positive("batch_size", batch_size), _positive("seq_len", seq_len)
    prefetch = _positive("prefetch", prefetch)
    bound = named_plan(plan.bind(len(tokens), seq_len))
    placement = resolve_sharding(sharding, batch_size, seq_len)
    if transform is not None and placement.memory_kind is not None:
        raise ValueError(
            f"sharding has memory_kind={placement.memory_kind!r}, and a transform computes in the devices' "
            f"own memory; leave memory_kind out and move a batch with jax.device_put(batch, ...), or pass "
            f"transform=None, whose blocks go there"
        )
    group = 1
    if transform is not None and placement.stacks:
        batch_bytes = batch_size * (seq_len + 1) * tokens.dtype.itemsize
        group = group_size(batch_bytes // len(processes_of(placement.sharding)), prefetch)
    tokens.fingerprint()  # now, and kept: a state must be had also when the file cannot be read any more
    cursor = Cursor.begin(bound, batch_size)
    members = processes_of(placement.sharding)
    if len(members) > 1 and jax.process_index() == members[0]:  # once is enough
        warn_of_shared_reads(tokens, plan, bound, placement, stacklevel=3)
    return LoaderSetup(tokens, prefetch, transform, cursor, placement, group)


def _positive(name: str, value: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(
            f"{name} is {value!r} of type {type(value).__name__}; expected an integer of 1 or more"
        ) from None
    if number < 1:
        raise ValueError(f"{name}={number}; expected 1 or more")
    return number
