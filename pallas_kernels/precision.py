"""The precision that arithmetic is done in, whatever the precision values are stored in."""

from __future__ import annotations

from typing import Any, Protocol

import jax.numpy as jnp


class HasDtype(Protocol):
    @property
    def dtype(self) -> Any: ...


def working_dtype(x: HasDtype) -> Any:
    """float32, or float64 for float64 inputs (oracles)."""
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32
