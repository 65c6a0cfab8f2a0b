"""The op as users call it, whichever implementation runs."""

from __future__ import annotations

from typing import Any

from jax import Array
from jaxtyping import Float, Int32

from ..triton import Implementation, use_pallas
from . import kernel, reference
from .reference import Norms


def rotate_and_write(
    q: Float[Array, "T H G D"] | None,
    k: Float[Array, "T Hkv D"],
    v: Float[Array, "T Hkv V"],
    norms: Norms | None,
    eps: float,
    positions: Int32[Array, " T"],
    rotary_dim: int,
    theta: float,
    keys: Float[Array, "P L page Hkv D"],
    values: Float[Array, "P L page Hkv V"],
    layer: int | Array,
    kv_slots: Int32[Array, " T"],
    *,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> tuple[
    Float[Array, "T H D"] | None, Float[Array, "P L page Hkv D"], Float[Array, "P L page Hkv V"]
]:
    """RMS-normalise (with `norms`) and rotate queries and keys; the keys and values go to their
    slots (page * page_size + offset; negative ones are dropped). Queries are q[:, :, 0]: gates may
    stand beside them. Without queries none come out, and keys and values are only written. The
    kernel rotates powers of two; by name, another case is an error.
    """
    where: tuple[Any, ...] = (positions, rotary_dim, theta, keys, values, layer, kv_slots)
    if use_pallas(implementation):
        if kernel.supported(k, values, rotary_dim):
            return kernel.rotate_and_write(q, k, v, norms, eps, *where, interpret=interpret)
        if implementation == "pallas":
            raise NotImplementedError(
                f"k {k.shape}, values {values.shape}, {rotary_dim} rotated: the kernel takes dims "
                "up to 512, and rotates powers of two"
            )
    return reference.rotate_and_write(q, k, v, norms, eps, *where)
