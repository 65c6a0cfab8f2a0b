"""Before the scan: what a tile of tokens does to any state, per tile and value head.

With decay D_ij = exp(g_{j+1} + ... + g_i) and q, k normalised (q scaled by K**-0.5 too):

    A = b_i (k_i . k_j) D_ij  (i > j);   T = (I + A)^-1 diag(b);   P = (q_i . k_j) D_ij  (i >= j)

Beside them the scan needs queries and keys: normalised ones for each key head (GDN; decays are
left to scales of rows), decayed ones for each value head (KDA). One kernel writes all of these but
T, for which it leaves A; a second inverts.

For bf16 inputs the tiles are float16: everything in them is bounded by the norms of the keys.
Three more bits than bf16 has matter: with repeated keys each token takes back what the one before
it wrote, and the roundings of a whole tile add up.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from ..ragged import TileRanges
from ..triton import triton_call
from .channel_decay import sum_masks
from .channel_products import channel_products
from .head_products import head_products
from .inputs import Gates
from .inverse import invert
from .tile import BLOCK, Inputs, Options, Prepared, Tile


def _kernel(*refs: Any, names: tuple[str, ...], options: Options) -> None:
    count = len(refs) - len(names)
    inputs = Inputs(*refs[:count])
    tile = Tile(inputs, Prepared(**dict(zip(names, refs[count:], strict=True))), options)
    program = head_products if inputs.masks is None else channel_products
    pl.when(tile.rows > 0)(lambda: program(tile))


def prepare(
    qkv: Array, gates: Gates, gate_set: Array, tiles: TileRanges, options: Options
) -> Prepared:
    """Gate parameters have a leading axis, of which each tile takes the row `gate_set` [N]."""
    made = products(qkv, gates, gate_set, tiles, options)
    t = invert(made.t, made.beta, tiles.rows, options.tuning, options.interpret)
    return made._replace(t=t)


def products(
    qkv: Array, gates: Gates, gate_set: Array, tiles: TileRanges, options: Options
) -> Prepared:
    """What `prepare` returns, with A in the place of T."""
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
        "beta": out(*cells),
        "value_size": out(heads, count),
        "k": key_tiles,
    }
    if options.outputs:
        shapes["q"], shapes["p"] = key_tiles, tile(*cells, tuning.chunk)
    inputs = Inputs(tiles.start, tiles.rows, gate_set, qkv, *gates)
    if per_channel:
        shapes["k_to_end"], shapes["decay"] = key_tiles, out(count, heads, keys)
        masks = sum_masks(BLOCK, tuning.decay_leaf, tuning.tile_dtype)
        inputs = inputs._replace(masks=masks)
    else:
        shapes["from_start"] = shapes["to_end"] = out(*cells)
    call = triton_call(
        functools.partial(_kernel, names=tuple(shapes), options=options),
        "gated_delta_rule_products",
        (heads if per_channel else key_heads, count),
        tuple(shapes.values()),
        warps=tuning.product_warps,
        interpret=options.interpret,
    )
    results = call(*(x for x in inputs if x is not None))
    return Prepared(**dict(zip(shapes, results, strict=True)))
