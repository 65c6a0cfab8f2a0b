"""Few rows against a large weight matrix, which is streamed once."""

from .api import skinny_matmul
from .reference import skinny_matmul as skinny_matmul_reference

__all__ = ["skinny_matmul", "skinny_matmul_reference"]
