"""The ops as users call them: one function each, whichever implementation runs."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int32

from ..triton import Implementation, use_pallas
from . import library, reference, tuning, work
from .attend import attend
from .flash import head_blocks


def _choose(implementation: Implementation | None, q: Array, value_dim: int) -> bool:
    """True for Pallas. Asked for by name, a case the kernel does not cover is an error."""
    if not use_pallas(implementation):
        return False
    dims = (q.shape[-1], value_dim)
    covered = all(dim % 16 == 0 and dim <= 1024 for dim in dims)
    covered = covered and q.dtype in (jnp.bfloat16, jnp.float32)
    if not covered and implementation == "pallas":
        raise NotImplementedError(
            f"key dim {dims[0]}, value dim {dims[1]}, {q.dtype}: the kernel takes multiples "
            "of 16 up to 1024 in bfloat16 or float32"
        )
    return covered


def ragged_paged_attention(
    q: Float[Array, "T Hq D"],
    keys: Float[Array, "P L page Hkv D"],
    values: Float[Array, "P L page Hkv V"] | None,
    layer: int | Array,
    positions: Int32[Array, " T"],
    cu_seqlens: Int32[Array, " N1"],
    page_table: Int32[Array, "N pages"],
    *,
    scale: float,
    value_dim: int | None = None,
    whole_prompt: bool = False,
    tile: int = 64,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> Float[Array, "T Hq V"]:
    """Packed queries of N sequences against their pages, which already hold their own keys.

    A query at position p sees keys 0..p of its sequence; positions rise within a sequence. Tokens
    behind the last sequence give finite values that mean nothing. `values` None takes the first
    `value_dim` entries of each key as its value (MLA latents). `tile` is of the XLA form.

    `whole_prompt` promises that the first sequence is the whole batch, from position 0 on: then
    None is cuDNN where `prefers_whole_prompt` says so (library.py), and else the Pallas kernel on a
    GPU.
    """
    width = value_dim if value_dim is not None else keys.shape[-1]
    if _choose(implementation, q, width):
        room = page_table.shape[1] * keys.shape[2]
        fits = library.covers(q.shape[0], room, q.shape[2], width, q.dtype)
        if whole_prompt and fits and implementation is None and values is not None:
            return library.attend(q, keys, values, layer, cu_seqlens, page_table, scale=scale)
        at = (positions, cu_seqlens, page_table)
        options = {"scale": scale, "value_dim": width, "interpret": interpret}
        return prefill(q, keys, values, layer, *at, **options)
    return reference.ragged_paged_attention(
        q,
        keys,
        values,
        layer,
        positions,
        cu_seqlens,
        page_table,
        scale=scale,
        value_dim=value_dim,
        tile=tile,
    )


def prefers_whole_prompt(
    tokens: int, room: int, key_dim: int, value_dim: int, dtype: DTypeLike
) -> bool:
    """Whether a step of one whole prompt has a faster form than any other step of its size; a
    sequence has pages for `room` tokens."""
    return use_pallas(None) and library.covers(tokens, room, key_dim, value_dim, jnp.dtype(dtype))


def decode_paged_attention(
    q: Float[Array, "N Hq D"],
    keys: Float[Array, "P L page Hkv D"],
    values: Float[Array, "P L page Hkv V"] | None,
    layer: int | Array,
    positions: Int32[Array, " N"],
    page_table: Int32[Array, "N pages"],
    *,
    scale: float,
    value_dim: int | None = None,
    gates: Float[Array, "N Hq 2 V"] | None = None,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> Float[Array, "N Hq V"]:
    """One query for each of N sequences; a negative position sees nothing and gives zeros.

    With `gates` the result is multiplied by the sigmoid of gates[:, :, 1]: beside them are the
    queries, as a projection leaves both.
    """
    width = value_dim if value_dim is not None else keys.shape[-1]
    if _choose(implementation, q, width):
        return decode(
            q,
            keys,
            values,
            layer,
            positions,
            page_table,
            scale=scale,
            value_dim=width,
            gates=gates,
            interpret=interpret,
        )
    o = reference.decode_paged_attention(
        q, keys, values, layer, positions, page_table, scale=scale, value_dim=value_dim
    )
    return o if gates is None else reference.gated(o, gates)


def decode(
    q: Array,
    keys: Array,
    values: Array | None,
    layer: int | Array,
    positions: Array,
    page_table: Array,
    *,
    scale: float,
    value_dim: int,
    gates: Array | None = None,
    tuned: tuning.Tuning | None = None,
    interpret: bool = False,
) -> Array:
    """`decode_paged_attention` by the kernel: every sequence is cut into pieces of its keys."""
    group = q.shape[1] // keys.shape[3]
    tuned = tuned or tuning.decode_tuning(group, q.shape[2], q.dtype)
    heads = head_blocks(q.shape[1], keys.shape[3], tuned.rows)
    context = page_table.shape[1] * keys.shape[2]
    left = 4 * q.shape[1] * value_dim
    enough = tuning.filling(q.shape[0] * heads.blocks, tuned)
    cut = tuning.make_cut(q.shape[0], enough, left, context, tuned)
    tiles = work.decode_tiles(positions)
    pieces = work.make_pieces(tiles, cut, tuned)
    args = (q, keys, values, layer, positions, page_table, tiles, pieces, cut, tuned)
    options: Any = {"scale": scale, "value_dim": value_dim, "interpret": interpret}
    return attend(*args, gates=gates, **options)


def prefill(
    q: Array,
    keys: Array,
    values: Array | None,
    layer: int | Array,
    positions: Array,
    cu_seqlens: Array,
    page_table: Array,
    *,
    scale: float,
    value_dim: int,
    tuned: tuning.Tuning | None = None,
    interpret: bool = False,
) -> Array:
    """`ragged_paged_attention` by the kernel: few tiles are cut into pieces, many are not."""
    group = q.shape[1] // keys.shape[3]
    tuned = tuned or tuning.prefill_tuning(q.shape[0], group, q.shape[2], q.dtype)
    heads = head_blocks(q.shape[1], keys.shape[3], tuned.rows)
    per_tile = tuned.rows // heads.together
    tiles = work.prefill_tiles(positions, cu_seqlens, per_tile)
    count, context = tiles.keys.shape[0], page_table.shape[1] * keys.shape[2]
    left = 4 * per_tile * q.shape[1] * value_dim
    if q.shape[0] <= tuning.FEW:  # tiles of one sequence; the others of the bucket see no key
        enough = tuning.at_once(-(-q.shape[0] // per_tile) * heads.blocks, tuned)
    else:
        enough = tuning.filling(count * heads.blocks, tuned)
    cut = tuning.make_cut(count, enough, left, context, tuned)
    pieces = work.make_pieces(tiles, cut, tuned)
    args = (q, keys, values, layer, positions, page_table, tiles, pieces, cut, tuned)
    return attend(*args, scale=scale, value_dim=value_dim, interpret=interpret)
