"""Few rows against large weight matrices, which are streamed once."""

from .api import skinny_matmul, skinny_matmuls
from .reference import Norm, Product, rms_norm

__all__ = ["Norm", "Product", "rms_norm", "skinny_matmul", "skinny_matmuls"]
