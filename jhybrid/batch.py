"""What a forward pass runs over, and the caches it reads and returns.

Everything a step needs is in one of these batches; the layers match on its type.
"""

from __future__ import annotations

from flax import struct
from jax import Array
from jaxtyping import Float, Int32

from pallas_kernels import Segments


@struct.dataclass
class PrefillBatch:
    """Sequences packed end to end; sequence n is tokens cu_seqlens[n]:cu_seqlens[n+1].

    `kv_slots` is page * page_size + offset of each token's key and value, -1 where they are not
    written (padding, or already there). `segments` cuts the same tokens for the recurrent layers.
    `input_slots` says likewise where each token's group inputs go; None in caches without them.
    `whole_prompt` promises one sequence, from its first token on: attention has a faster form.
    """

    token_ids: Int32[Array, " T"]
    positions: Int32[Array, " T"]
    kv_slots: Int32[Array, " T"]
    cu_seqlens: Int32[Array, " N1"]
    page_table: Int32[Array, "N P"]
    segments: Segments
    input_slots: Int32[Array, " T"] | None = None
    whole_prompt: bool = struct.field(pytree_node=False, default=False)

    @property
    def most_sequences(self) -> int:
        return 1 if self.whole_prompt else self.cu_seqlens.shape[0] - 1


@struct.dataclass
class ReplayBatch:
    """Cached tokens whose group inputs, at `input_slots`, roll linear states forward.

    Packed as in a PrefillBatch: `segments` says where states come from and go to.
    """

    token_ids: Int32[Array, " T"]
    input_slots: Int32[Array, " T"]
    segments: Segments


@struct.dataclass
class DecodeBatch:
    """One token for each of N sequences. Padding rows have position, slots and pages -1."""

    token_ids: Int32[Array, " N"]
    positions: Int32[Array, " N"]
    kv_slots: Int32[Array, " N"]
    page_table: Int32[Array, "N P"]
    state_slots: Int32[Array, " N"]
    input_slots: Int32[Array, " N"] | None = None


@struct.dataclass
class DenseBatch:
    """B whole sequences of one length, from zero state, no caches: training and analysis.

    What lies before a row's token `state_cut` is not in the recurrent states after it, and tokens
    from `key_cut` on do not attend to it: training withholds one way of remembering so that the
    other is learned. A cut at T cuts nothing.
    """

    token_ids: Int32[Array, "B T"]
    state_cut: Int32[Array, " B"] | None = None
    key_cut: Int32[Array, " B"] | None = None


Batch = PrefillBatch | DecodeBatch | DenseBatch


def wanted_rows(batch: Batch | ReplayBatch) -> Int32[Array, ""] | None:
    """How many of a prefill's rows are no padding; None for a batch in which all may count."""
    return batch.cu_seqlens[-1] if isinstance(batch, PrefillBatch) else None


@struct.dataclass
class GroupInputs:
    """Pages of group inputs: G rows a token, one for each group whose input is kept.

    Eight-bit rows have a scale each, float32; others none.
    """

    rows: Float[Array, "P G page D"]
    scales: Float[Array, "P G page"] | None


@struct.dataclass
class Caches:
    """All device caches of a model: KV pages of its full layers, state slots of its linear ones.

    A page and a slot hold all layers, so that a prefix and a checkpoint are contiguous rows.
    `values` is None where keys hold latents that serve as both. Full layer i of the model uses
    index i among the full layers, a linear layer likewise.
    """

    keys: Float[Array, "P Lf page Hkv D"]
    values: Float[Array, "P Lf page Hkv V"] | None
    recurrent: Float[Array, "S Ll H K V"]
    conv: Float[Array, "S Ll W C"]
    group_inputs: GroupInputs | None = None
