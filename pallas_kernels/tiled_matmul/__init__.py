"""Many rows against one or two weight matrices, combined or added to before they are stored."""

from .api import tiled_matmul

__all__ = ["tiled_matmul"]
