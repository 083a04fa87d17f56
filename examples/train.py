"""Trains a small language model on a token file: a whole run in one file, on a CPU or one GPU.

    python examples/train.py train.safetensors
    python examples/train.py train.bin --dtype uint16 --vocab-size 50304 --steps 1000

The same command with more steps goes on from the last checkpoint in --out, with the batches that were
to come: 200 steps, or 100 and then 100 more, give the same losses.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp

import tokenloader as tl

BATCH_SIZE, SEQ_LEN = 8, 128
LAYERS, HEADS, WIDTH = 2, 4, 128
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def init_state(vocab_size: int) -> dict:
    """Make random parameters, and the optimizer's state."""
    shapes = {
        "embedding": (vocab_size, WIDTH),
        "positions": (SEQ_LEN, WIDTH),
        "qkv": (LAYERS, WIDTH, 3 * WIDTH),
        "out": (LAYERS, WIDTH, WIDTH),
        "up": (LAYERS, WIDTH, 4 * WIDTH),
        "down": (LAYERS, 4 * WIDTH, WIDTH),
    }
    keys = jax.random.split(jax.random.key(0), len(shapes))
    normal = map(jax.random.normal, keys, shapes.values())
    params = {name: 0.05 * values for name, values in zip(shapes, normal, strict=True)}
    return {"params": params, "optimizer": OPTIMIZER.init(params)}


def losses(params: dict, batch: tl.Batch) -> jax.Array:
    """The model, a transformer: the loss of each target in nats, float32 [BATCH_SIZE, SEQ_LEN]."""
    norm = jax.nn.standardize
    x = params["embedding"][batch.inputs] + params["positions"]
    for i in range(LAYERS):
        heads = (norm(x) @ params["qkv"][i]).reshape(*x.shape[:2], 3, HEADS, -1)
        attention = jax.nn.dot_product_attention(*jnp.unstack(heads, axis=2), is_causal=True)
        x += attention.reshape(x.shape) @ params["out"][i]
        x += jax.nn.gelu(norm(x) @ params["up"][i]) @ params["down"][i]
    logits = norm(x) @ params["embedding"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)


@partial(jax.jit, donate_argnums=0)
def train_step(state: dict, batch: tl.Batch) -> tuple[dict, jax.Array]:
    """Update the state once. Returns the next state, and the mean loss of the batch."""
    loss, gradient = jax.value_and_grad(lambda p: losses(p, batch).mean())(state["params"])
    updates, optimizer = OPTIMIZER.update(gradient, state["optimizer"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer}, loss


@jax.jit
def eval_step(params: dict, batch: tl.Batch) -> tuple[jax.Array, jax.Array]:
    """The sum of the losses of a batch, and the number of targets in it."""
    mask = batch.loss_mask  # hides the padding of the last batch
    return losses(params, batch).sum(where=mask), mask.sum()


def evaluate(params: dict, tokens: tl.TokenArray) -> float:
    """The mean loss over all targets of `tokens`, each counted once."""
    with tl.TokenLoader(tokens, BATCH_SIZE, SEQ_LEN, plan=tl.SequentialWindows()) as loader:
        sums = [eval_step(params, batch) for batch in loader]
    loss, count = map(sum, zip(*sums, strict=True))
    return float(loss / count)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", nargs="+", help="token files of any format; several become one")
    parser.add_argument("--dtype", help="dtype of files without a header, for example uint16")
    parser.add_argument("--vocab-size", type=int, default=50257)
    parser.add_argument("--steps", type=int, default=200, help="updates in all")
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("runs/train"), help="for checkpoints")
    args = parser.parse_args()

    # The last 1% of the tokens is for validation. Nothing is copied: both are views of the file.
    tokens = tl.open_tokens(args.data, dtype=args.dtype)
    tokens, validation = tokens.split(-min(len(tokens) // 100, 100_000))
    print(f"{len(tokens):,} tokens to train on, {len(validation):,} for validation")
    loader = tl.TokenLoader(tokens, BATCH_SIZE, SEQ_LEN, plan=tl.ShuffledEpochs(seed=0))
    if loader.window_tokens(0).max() >= args.vocab_size:
        sys.exit(f"the data has token ids of {args.vocab_size} or more; pass a larger --vocab-size")

    state = init_state(args.vocab_size)
    tidy = ocp.CheckpointManagerOptions(cleanup_tmp_directories=True)  # of a save that was cut off
    with loader, ocp.CheckpointManager((args.out / "checkpoints").absolute(), options=tidy) as checkpoints:
        if start := checkpoints.latest_step() or 0:
            items = {"state": ocp.args.StandardRestore(state), "loader": ocp.args.JsonRestore()}
            saved = checkpoints.restore(start, args=ocp.args.Composite(**items))
            state = saved.state
            loader.set_state(saved.loader)
            print(f"continuing after step {start}")

        for step, batch in zip(range(start + 1, args.steps + 1), loader, strict=False):
            state, loss = train_step(state, batch)
            is_last = step == args.steps
            if step % args.log_every == 0 or is_last:
                print(f"step {step}: loss {loss:.4f}", flush=True)
            if step % 100 == 0 or is_last:
                train, data = ocp.args.StandardSave(state), ocp.args.JsonSave(loader.get_state())
                checkpoints.save(step, args=ocp.args.Composite(state=train, loader=data))
    print(f"validation loss {evaluate(state['params'], validation):.4f}")


if __name__ == "__main__":
    main()
