"""GPT-2 as plain JAX: a tree of arrays, and functions of it.

Learned positions, layer norm before each sub-layer, GELU (tanh form), the token embedding tied to
the output. Parameters are float32; `Config.dtype` is what activations are computed in.

In shapes: B sequences, T tokens, D width, H heads, V padded vocabulary.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners";
https://github.com/openai/gpt-2/blob/master/src/model.py
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

Params = dict[str, Any]  # a tree with float32 arrays as leaves


@dataclass(frozen=True)
class Config:
    """The shape of a GPT-2. The defaults are the 124M model."""

    vocab_size: int = 50257
    seq_len: int = 1024
    num_layers: int = 12
    num_heads: int = 12
    width: int = 768
    dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        if self.width % self.num_heads:
            raise ValueError(f"width {self.width} does not divide into {self.num_heads} heads")

    @property
    def padded_vocab_size(self) -> int:
        """A multiple of 128, because matrix units are slow at sizes such as 50257."""
        return -(-self.vocab_size // 128) * 128


def init(config: Config, key: jax.Array) -> Params:
    """Random normal parameters: standard deviation 0.02 at width 768, as GPT-2; more when narrower."""
    D = config.width
    keys = iter(jax.random.split(key, 2 + 4 * config.num_layers))
    std = 0.02 * (768 / D) ** 0.5
    # Projections that add to the residual stream start smaller: it is a sum over 2 L sub-layers.
    residual_std = std / (2 * config.num_layers) ** 0.5

    def linear(num_in: int, num_out: int, std: float = std) -> Params:
        w = std * jax.random.normal(next(keys), (num_in, num_out))
        return {"w": w, "b": jnp.zeros(num_out)}

    def norm() -> Params:
        return {"scale": jnp.ones(D), "bias": jnp.zeros(D)}

    def block() -> Params:
        return {
            "norm_1": norm(),
            "qkv": linear(D, 3 * D),
            "attention_out": linear(D, D, residual_std),
            "norm_2": norm(),
            "mlp_in": linear(D, 4 * D),
            "mlp_out": linear(4 * D, D, residual_std),
        }

    return {
        "token_embedding": std * jax.random.normal(next(keys), (config.padded_vocab_size, D)),
        "position_embedding": std * jax.random.normal(next(keys), (config.seq_len, D)),
        "blocks": [block() for _ in range(config.num_layers)],
        "final_norm": norm(),
    }


def decay_mask(params: Params) -> Params:
    """Mark the parameters that decay: matrices and embeddings, not biases and norms (nanoGPT's rule)."""
    return jax.tree.map(lambda p: p.ndim >= 2, params)


def forward(params: Params, tokens: jax.Array, config: Config) -> jax.Array:
    """Logits of the token that follows each of `tokens`, int [B, T]: config.dtype [B, T, V]."""
    # Cast after the look-up: its gradient adds up thousands of rows, which needs float32.
    x = params["token_embedding"][tokens] + params["position_embedding"][: tokens.shape[1]]
    x = x.astype(config.dtype)
    # A Python loop: 12 layers compile in seconds. At 50 layers, stack the blocks and lax.scan.
    for p in params["blocks"]:
        x = x + _attention(p, _layer_norm(p["norm_1"], x), config.num_heads)
        x = x + _mlp(p, _layer_norm(p["norm_2"], x))
    return _layer_norm(params["final_norm"], x) @ params["token_embedding"].astype(x.dtype).T


def loss_per_token(params: Params, inputs: jax.Array, targets: jax.Array, config: Config) -> jax.Array:
    """The negative log-likelihood of each target in nats, float32 [B, T]."""
    return _cross_entropy(forward(params, inputs, config), targets, config.vocab_size)


@partial(jax.jit, static_argnames=("config", "num_tokens"))
def sample(
    params: Params,
    prompt: jax.Array,
    key: jax.Array,
    *,
    config: Config,
    num_tokens: int,
    temperature: float = 0.8,
) -> jax.Array:
    """Sample tokens that continue `prompt`, int [at most seq_len]: int32 [num_tokens].

    The whole window is computed again for every token: slow, but short. Serious sampling keeps the
    keys and values of earlier positions.
    """
    length = prompt.shape[0]
    window = jnp.zeros(config.seq_len, jnp.int32).at[:length].set(prompt)

    def next_token(carry: tuple[jax.Array, jax.Array], key: jax.Array) -> tuple[Any, jax.Array]:
        # The window's content from `length` on does not matter: attention is causal.
        window, length = carry
        logits = forward(params, window[None], config)[0, length - 1, : config.vocab_size]
        token = jax.random.categorical(key, logits.astype(jnp.float32) / temperature)
        token = token.astype(window.dtype)
        full = length == config.seq_len
        window = jnp.where(full, jnp.roll(window, -1), window)
        length = jnp.where(full, length - 1, length)
        return (window.at[length].set(token), length + 1), token

    keys = jax.random.split(key, num_tokens)
    return jax.lax.scan(next_token, (window, jnp.int32(length)), keys)[1]


@partial(jax.checkpoint, static_argnums=2)
def _cross_entropy(logits: jax.Array, targets: jax.Array, vocab_size: int) -> jax.Array:
    """Softmax cross-entropy in float32, without a float32 array of the logits' size.

    The logits are by far the largest array of a step. `checkpoint` keeps only them for the backward
    pass, in their own dtype, and computes the rest again: elementwise work, which the compiler fuses
    into the sums. Targets are found by comparison with all ids, because the gradient of indexing is
    a scatter into one more array of that size.
    """
    ids = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
    # The padding of the vocabulary must not take any of the probability.
    logits = jnp.where(ids < vocab_size, logits.astype(jnp.float32), -jnp.inf)
    target_logits = jnp.where(ids == targets[..., None], logits, 0.0).sum(axis=-1)
    return jax.nn.logsumexp(logits, axis=-1) - target_logits


def _layer_norm(p: Params, x: jax.Array) -> jax.Array:
    """Layer norm, computed in float32 whatever x is: it takes a mean of many small numbers."""
    y = x.astype(jnp.float32)
    y = y - y.mean(axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.square(y).mean(axis=-1, keepdims=True) + 1e-5)
    return (y * p["scale"] + p["bias"]).astype(x.dtype)


def _linear(p: Params, x: jax.Array) -> jax.Array:
    return x @ p["w"].astype(x.dtype) + p["b"].astype(x.dtype)


def _attention(p: Params, x: jax.Array, num_heads: int) -> jax.Array:
    B, T, D = x.shape
    qkv = _linear(p["qkv"], x).reshape(B, T, 3, num_heads, D // num_heads)
    # cuDNN's fused attention never holds the scores [B, H, T, T]. It needs a GPU and 16-bit inputs;
    # None chooses XLA's own attention.
    fused = jax.default_backend() == "gpu" and x.dtype == jnp.bfloat16
    y = jax.nn.dot_product_attention(
        *jnp.unstack(qkv, axis=2),  # queries, keys, values: each [B, T, H, D / H]
        is_causal=True,
        implementation="cudnn" if fused else None,
    )
    return _linear(p["attention_out"], y.reshape(B, T, D))


def _mlp(p: Params, x: jax.Array) -> jax.Array:
    return _linear(p["mlp_out"], jax.nn.gelu(_linear(p["mlp_in"], x), approximate=True))
