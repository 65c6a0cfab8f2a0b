"""First kernel of a prefill: what a tile of tokens does to any state, per tile and value head.

With decay D_ij = exp(g_{j+1} + ... + g_i) and q, k normalised (q scaled by K**-0.5 too):

    A = b_i (k_i . k_j) D_ij  (i > j);   T = (I + A)^-1 diag(b);   P = (q_i . k_j) D_ij  (i >= j)

Beside them the scan needs queries and keys: normalised ones for each key head (GDN; decays are
left to scales of rows), decayed ones for each value head (KDA).

For bf16 inputs the tiles are float16: everything in them is bounded by the norms of the keys.
Three more bits than bf16 has matter: with repeated keys each token takes back what the one before
it wrote, and the roundings of a whole tile add up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike

from ..ragged import TileRanges
from ..triton import Dot, dividing_block, exp, iota, power_of_two_blocks, triton_call
from .channel_decay import LEAST, add_decayed_products, sum_masks
from .inputs import Activation, Gates
from .inverse import unit_lower_inverse
from .reference import L2_EPS
from .tuning import PrefillTuning


class Prepared(NamedTuple):
    """What the scan reads. In GDN queries and keys are shared by the value heads of a key head."""

    t: Any  # [N, H, C, C]
    value_size: Any  # [H, N] the tile's largest value
    decay: Any  # over the tile: [N, H], KDA [N, H, K]
    k: Any  # [N, Hk, C, K]; KDA: decayed from the tile's start
    q: Any = None  # likewise; None without outputs
    p: Any = None  # [N, H, C, C]; None without outputs
    k_to_end: Any = None  # KDA: [N, H, C, K]
    from_start: Any = None  # GDN: decays of rows [N, H, C]
    to_end: Any = None


class _Inputs(NamedTuple):
    start: Any
    rows: Any
    gate_set: Any  # [N] which row of A_log and dt_bias a tile takes
    qkv: Any
    decay: Any
    beta: Any
    A_log: Any
    dt_bias: Any
    masks: Any = None  # KDA


@dataclass(frozen=True)
class Options:
    """What both kernels of a prefill are built for."""

    key_dim: int
    value_dim: int
    activation: Activation
    tuning: PrefillTuning
    outputs: bool  # or states alone
    interpret: bool


class _Tile:
    """A program's tile: loads of its tokens, stores to its cells, products in its precisions."""

    def __init__(self, inputs: _Inputs, out: Prepared, options: Options):
        tuning, interpret = options.tuning, options.interpret
        self.inputs, self.out, self.options = inputs, out, options
        self.head, self.index = pl.program_id(0), pl.program_id(1)
        self.size = tuning.chunk
        self.tokens = pl.ds(inputs.start[self.index], self.size)
        self.rows, self.gate_set = inputs.rows[self.index], inputs.gate_set[self.index]
        self.valid = iota((self.size,), 0) < self.rows
        self.dot = Dot(tuning.products, interpret)
        self.leaf_dot = Dot(tuning.leaf_products, interpret)
        self.bf16_dot, self.f32_dot = Dot("bf16", interpret), Dot("tf32x3", interpret)

    def load(self, ref: Any, *index: Any) -> Array:
        mask = self.valid if len(index) == 1 else self.valid[:, None]
        return plt.load(ref.at[(self.tokens, *index)], mask=mask, other=0.0)

    def load_keys(self, key_head: Any, part: tuple[Any, int], queries: bool = False) -> Array:
        offset, width = part
        first = 0 if queries else self.options.key_dim
        return self.load(self.inputs.qkv, key_head, pl.ds(first + offset, width))

    def exact_dot(self, a: Array, b: Array) -> Array:
        """a b^T of the inputs themselves."""
        return (self.bf16_dot if a.dtype == jnp.bfloat16 else self.f32_dot)(a, b, tb=True)

    def beta(self, head: Any) -> Array:
        logits = self.load(self.inputs.beta, head).astype(jnp.float32)
        return jnp.where(self.valid, self.options.activation.strength(logits), 0.0)

    def inverse_norm(self, parts: list[Array]) -> Array:
        squares = (jnp.sum(jnp.square(x.astype(jnp.float32)), axis=1) for x in parts)
        return lax.rsqrt(functools.reduce(jnp.add, squares) + L2_EPS)

    def store_value_size(self, key_head: Any, place: Any, head: Any) -> None:
        """The largest value of the head that is number `place` of its group."""
        first = 2 * self.options.key_dim + place * self.options.value_dim
        parts = power_of_two_blocks(self.options.value_dim)
        values = (self.load(self.inputs.qkv, key_head, pl.ds(first + o, w)) for o, w in parts)
        sizes = (jnp.max(jnp.abs(v.astype(jnp.float32))) for v in values)
        self.out.value_size[head, self.index] = functools.reduce(jnp.maximum, sizes)

    def store_p(self, head: Any, qk: Array) -> None:
        i, j = iota(qk.shape, 0), iota(qk.shape, 1)
        cell = self.index, head
        self.out.p[cell] = jnp.where(i >= j, qk, 0.0).astype(self.out.p.dtype)

    def store_t(self, head: Any, kk: Array) -> None:
        """From the products of decayed keys."""
        i, j = iota(kk.shape, 0), iota(kk.shape, 1)
        cell, beta = (self.index, head), self.beta(head)
        a = jnp.where(i > j, kk * beta[:, None], 0.0)
        leaf = self.options.tuning.inverse_leaf
        inverse = unit_lower_inverse(a, self.out.t, cell, leaf, self.dot)
        self.out.t[cell] = (inverse * beta[None, :]).astype(self.out.t.dtype)


def _head_decay(g: Array, exact: bool) -> tuple[Array, Array, Array]:
    """D [C, C] (1 above the diagonal), exp(G) [C], exp of the sums behind each token [C]."""
    size = g.shape[0]
    i, j = iota((size, size), 0), iota((size, size), 1)
    upto = jnp.cumsum(g)
    if exact:  # sums over the short range alone: differences of long sums cancel
        sums = jnp.cumsum(jnp.where(i > j, g[:, None], 0.0), axis=0)
        behind = jnp.sum(jnp.where(i > j, g[:, None], 0.0), axis=0)
    else:
        sums, behind = upto[:, None] - upto[None, :], jnp.sum(g) - upto
    # masked before the exponential: above the diagonal it would overflow
    decay = exp(jnp.where(i >= j, jnp.minimum(sums, 0.0), 0.0))
    return decay, exp(upto), exp(jnp.minimum(behind, 0.0))


def _head_kernel(t: _Tile) -> None:
    """Decay per head; a program takes the value heads of a key head in turn.

    First all that concerns queries, then keys alone: fewer arrays are held at a time.
    """
    inputs, out, options = t.inputs, t.out, t.options
    key_head, key_dim = t.head, options.key_dim
    group = inputs.beta.shape[1] // inputs.qkv.shape[1]
    blocks = power_of_two_blocks(key_dim)
    exact = inputs.qkv.dtype != jnp.bfloat16

    def load(queries: bool) -> tuple[list[Array], Array]:
        """The inputs, and the scales that normalise their rows."""
        parts = [t.load_keys(key_head, block, queries) for block in blocks]
        return parts, t.inverse_norm(parts) * (key_dim**-0.5 if queries else 1.0)

    def store(ref: Any, parts: list[Array], scale: Array) -> None:
        for block, x in zip(blocks, parts, strict=True):
            x = (x.astype(jnp.float32) * scale[:, None]).astype(ref.dtype)
            ref[t.index, key_head, :, pl.ds(*block)] = x

    def products(a: list[Array], b: list[Array], a_scale: Array, b_scale: Array) -> Array:
        x = functools.reduce(jnp.add, map(t.exact_dot, a, b))
        return x * (a_scale[:, None] * b_scale[None, :])

    def log_decay(head: Any) -> Array:
        z = t.load(inputs.decay, head).astype(jnp.float32)
        rate, bias = (ref[t.gate_set, head] for ref in (inputs.A_log, inputs.dt_bias))
        return jnp.where(t.valid, options.activation.log_decay(z, rate, bias), 0.0)

    def of_group(store_head: Callable[[Any, Any], None]) -> None:
        def one_head(place: Array, carry: Array) -> Array:
            store_head(place, key_head * group + place)
            return carry

        lax.fori_loop(0, group, one_head, jnp.int32(0))

    if options.outputs:
        (q, q_scale), (k, k_scale) = load(True), load(False)
        store(out.q, q, q_scale)
        qk = products(q, k, q_scale, k_scale)
        of_group(lambda _, head: t.store_p(head, qk * _head_decay(log_decay(head), exact)[0]))

    k, k_scale = load(False)
    store(out.k, k, k_scale)
    kk = products(k, k, k_scale, k_scale)

    def store_head(place: Any, head: Any) -> None:
        g = log_decay(head)
        decay, from_start, to_end = _head_decay(g, exact)
        out.decay[t.index, head] = exp(jnp.sum(g))
        out.from_start[t.index, head] = from_start
        out.to_end[t.index, head] = to_end
        t.store_value_size(key_head, place, head)
        t.store_t(head, kk * decay)

    of_group(store_head)


def _channel_kernel(t: _Tile) -> None:
    """Decay per channel, in a loop over blocks of key channels: no array is [C, K]."""
    inputs, out, options = t.inputs, t.out, t.options
    head, key_dim, tuning = t.head, options.key_dim, options.tuning
    key_head = head // (inputs.beta.shape[1] // inputs.qkv.shape[1])
    width = dividing_block(key_dim, tuning.key_block)

    def scale_of(queries: bool) -> Array:
        blocks = power_of_two_blocks(key_dim)
        return t.inverse_norm([t.load_keys(key_head, block, queries) for block in blocks])

    k_scale = scale_of(False)
    q_scale = scale_of(True) * key_dim**-0.5 if options.outputs else None
    rate = inputs.A_log[t.gate_set, head]

    def sum_of(mask: int, g: Array) -> Array:
        return t.dot(inputs.masks[mask], g)

    def store(ref: Any, x: Array, part: Any) -> None:
        ref[t.index, head, :, part] = x.astype(ref.dtype)

    def add_block(block: Array, sums: Any) -> Any:
        cut, part = (block * width, width), pl.ds(block * width, width)
        k = t.load_keys(key_head, cut).astype(jnp.float32) * k_scale[:, None]
        q = None
        if q_scale is not None:
            q = t.load_keys(key_head, cut, queries=True).astype(jnp.float32) * q_scale[:, None]
        z = t.load(inputs.decay, head, part).astype(jnp.float32)
        bias = inputs.dt_bias[t.gate_set, head, part]
        g = options.activation.log_decay(z, rate, bias[None, :])
        g = jnp.where(t.valid[:, None], jnp.maximum(g, LEAST), 0.0)
        sums, decayed = add_decayed_products(
            sums, q, k, g, sum_of, tuning.decay_leaf, t.leaf_dot, t.dot
        )
        if decayed.q_from_start is not None:
            store(out.q, decayed.q_from_start, part)
        store(out.k, decayed.k_from_start, part)
        store(out.k_to_end, decayed.k_to_end, part)
        rounded = g.astype(inputs.masks.dtype).astype(jnp.float32)
        out.decay[t.index, head, part] = exp(jnp.sum(rounded, axis=0))
        return sums

    zeros = jnp.zeros((t.size, t.size), jnp.float32)
    start = (zeros, zeros if options.outputs else None)
    kk, qk = lax.fori_loop(0, key_dim // width, add_block, start)
    t.store_value_size(key_head, head % (inputs.beta.shape[1] // inputs.qkv.shape[1]), head)
    if qk is not None:
        t.store_p(head, qk)
    t.store_t(head, kk)


def _kernel(*refs: Any, names: tuple[str, ...], options: Options) -> None:
    count = len(refs) - len(names)
    inputs = _Inputs(*refs[:count])
    tile = _Tile(inputs, Prepared(**dict(zip(names, refs[count:], strict=True))), options)
    program: Callable[[_Tile], None] = _head_kernel if inputs.masks is None else _channel_kernel
    pl.when(tile.rows > 0)(lambda: program(tile))


def prepare(
    qkv: Array, gates: Gates, gate_set: Array, tiles: TileRanges, options: Options
) -> Prepared:
    """Gate parameters have a leading axis, of which each tile takes the row `gate_set` [N]."""
    tuning, keys = options.tuning, options.key_dim
    count, heads, key_heads = tiles.start.shape[0], gates.beta.shape[1], qkv.shape[1]
    per_channel = gates.decay.ndim == 3
    cells = (count, heads, tuning.chunk)

    def out(*shape: int, dtype: DTypeLike = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    tile = functools.partial(out, dtype=tuning.tile_dtype)
    key_tiles = tile(count, heads if per_channel else key_heads, tuning.chunk, keys)
    shapes = {
        "t": tile(*cells, tuning.chunk),
        "value_size": out(heads, count),
        "decay": out(count, heads, keys) if per_channel else out(count, heads),
        "k": key_tiles,
    }
    if options.outputs:
        shapes["q"], shapes["p"] = key_tiles, tile(*cells, tuning.chunk)
    inputs = _Inputs(tiles.start, tiles.rows, gate_set, qkv, *gates)
    if per_channel:
        shapes["k_to_end"] = key_tiles
        masks = sum_masks(tuning.chunk, tuning.decay_leaf, tuning.tile_dtype)
        inputs = inputs._replace(masks=masks)
    else:
        shapes["from_start"] = shapes["to_end"] = out(*cells)
    call = triton_call(
        functools.partial(_kernel, names=tuple(shapes), options=options),
        "gated_delta_rule_prepare",
        (heads if per_channel else key_heads, count),
        tuple(shapes.values()),
        warps=tuning.prepare_warps,
        interpret=options.interpret,
    )
    results = call(*(x for x in inputs if x is not None))
    return Prepared(**dict(zip(shapes, results, strict=True)))
