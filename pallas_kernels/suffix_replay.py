"""States alone, rebuilt from the last tokens of many layers and sequences at once.

The kernels of a prefill without their outputs: no query is read, and nothing is written per token
but what carries the state from tile to tile.
"""

from __future__ import annotations

from jax import Array
from jaxtyping import Float, Int32

from .gated_delta_rule import prefill, reference
from .gated_delta_rule.api import choose_pallas
from .gated_delta_rule.inputs import SOFTPLUS, Activation, Gates, unpack
from .ragged import Segments, owner
from .triton import Implementation


def suffix_replay(
    qkv: Float[Array, "T Hk W"],
    gates: Gates,
    pool: Float[Array, "S L H K V"],
    layers: Int32[Array, " G"],
    segments: Segments,
    *,
    activation: Activation = SOFTPLUS,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> Float[Array, "S L H K V"]:
    """The pool with the states that `ragged_gated_delta_rule` would store, layer by layer.

    Segment i belongs to layer `layers[i]` of the pool; `A_log` and `dt_bias` are of all layers,
    [L, H] and [L, H, *K]. It starts from its slot, from zero or from the segment
    before it, and queries are not read. (The replay of Tail-Replay and of dasc, eq. 7.)
    """
    if choose_pallas(implementation, qkv, pool):
        _, pool = prefill.ragged_prefill(
            qkv, gates, pool, layers, layers, segments, activation,
            outputs=False, interpret=interpret,
        )  # fmt: skip
        return pool
    of_token = layers[owner(segments.cu, qkv.shape[0])]
    gates = gates._replace(A_log=gates.A_log[of_token], dt_bias=gates.dt_bias[of_token])
    five = unpack(qkv, gates, pool.shape[3], activation)
    return reference.ragged_gated_delta_rule(*five, pool, layers, segments)[1]
