"""Few rows against large weight matrices, which are streamed once."""

from .api import skinny_matmul, skinny_matmuls
from .reference import Product, Window, rms_norm

__all__ = ["Product", "Window", "rms_norm", "skinny_matmul", "skinny_matmuls"]
