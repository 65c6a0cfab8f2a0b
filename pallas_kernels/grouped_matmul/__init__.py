"""Matrix products of rows sorted by group, each with the matrix of its group."""

from .api import grouped_matmul, preferred_alignment

__all__ = ["grouped_matmul", "preferred_alignment"]
