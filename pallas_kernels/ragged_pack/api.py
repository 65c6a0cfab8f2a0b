"""The ops as users call them: one function each, whichever implementation runs.

Rows and slots are data, so that one compiled step serves every batch. A batch has a fixed size B;
entries with a negative slot on either side do nothing. Slots written to are distinct, and none of
them is read from by the same call. Of a tensor-parallel state each rank packs its own rows, -1
filling its list up to the longest rank's.
"""

from __future__ import annotations

from typing import Any

from jax import Array
from jaxtyping import Float32, Int32

from ..triton import Implementation, use_pallas
from . import kernel, reference
from .reference import Omitted, PackedStates


def pack_states(
    pool: Float32[Array, "S L H K V"],
    packed: PackedStates,
    rows: Int32[Array, " R"],
    source: Int32[Array, " B"],
    target: Int32[Array, " B"],
    *,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> PackedStates:
    """Row r of slot target[b] of `packed` becomes row rows[r] of slot source[b] of `pool`,
    rows numbered over [L, H, K]. A row -1 is padding: zeros."""
    _check(pool, packed, rows)
    if _choose(implementation, packed):
        return kernel.pack_states(pool, packed, rows, source, target, interpret=interpret)
    return reference.pack_states(pool, packed, rows, source, target)


def unpack_states(
    packed: PackedStates,
    pool: Float32[Array, "S L H K V"],
    rows: Int32[Array, " R"],
    source: Int32[Array, " B"],
    target: Int32[Array, " B"],
    *,
    omitted: Omitted,
    positions: Int32[Array, " N"] | None = None,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> Float32[Array, "S L H K V"]:
    """The inverse of `pack_states`. Rows that are not packed become zeros, or stay as they are.

    `positions` is `row_positions(rows, L * H * K)`, which only zeroing needs, for callers that
    keep it; it is computed otherwise.
    """
    if omitted not in ("zero", "keep"):
        raise ValueError(f"omitted is {omitted!r}; expected 'zero' or 'keep'")
    _check(pool, packed, rows)
    options: dict[str, Any] = {"omitted": omitted, "positions": positions}
    if _choose(implementation, packed):
        options["interpret"] = interpret
        return kernel.unpack_states(packed, pool, rows, source, target, **options)
    return reference.unpack_states(packed, pool, rows, source, target, **options)


def _choose(implementation: Implementation | None, packed: PackedStates) -> bool:
    """True for Pallas; nothing kept leaves a kernel nothing to read."""
    if not use_pallas(implementation) or packed.values.size == 0:
        return False
    covered = kernel.supported(packed)
    if not covered and implementation == "pallas":
        raise NotImplementedError(
            f"packed.values is int8 {packed.values.shape}, {packed.values.size / 2**30:.1f} GiB; "
            "the kernels take up to 2 GiB, or over 4"
        )
    return covered


def _check(pool: Array, packed: PackedStates, rows: Array) -> None:
    expected = (packed.values.shape[0], rows.shape[0], pool.shape[-1])
    if packed.values.shape != expected:
        raise ValueError(
            f"packed.values is {packed.values.shape}; expected [C, R, V] {expected} for "
            f"{rows.shape[0]} rows of a pool {pool.shape}"
        )
    kinds = {"float32": None, "int8": expected[:2]}
    name, scales = str(packed.values.dtype), packed.scales
    if name not in kinds or kinds[name] != (None if scales is None else scales.shape):
        raise ValueError(
            f"packed.values is {name} with scales {None if scales is None else scales.shape}; "
            f"expected float32 with none or int8 with {expected[:2]}"
        )
