"""RMSNorm. Weights are plain multipliers; zero-centred ones become 1 + w when converted."""

from __future__ import annotations

from typing import Any

from flax import struct
from jax import Array
from jaxtyping import Float

from pallas_kernels.skinny_matmul import rms_norm


@struct.dataclass
class Normed:
    """A norm that is still to be applied: a product of few rows does so while it reads them.

    Layers take it wherever they take an array that they only project.
    """

    x: Float[Array, "... D"]
    weight: Any  # [D] float32
    eps: float = struct.field(pytree_node=False)

    @property
    def value(self) -> Float[Array, "... D"]:
        return rms_norm(self.x, self.weight, self.eps)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.x.shape

    @property
    def ndim(self) -> int:
        return self.x.ndim

    @property
    def dtype(self) -> Any:
        return self.x.dtype


def value_of(x: Float[Array, "... D"] | Normed) -> Float[Array, "... D"]:
    return x.value if isinstance(x, Normed) else x


__all__ = ["Normed", "rms_norm", "value_of"]
