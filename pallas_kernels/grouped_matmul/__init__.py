"""Matrix products of rows sorted by group, each with the matrix of its group."""

from .reference import grouped_matmul

__all__ = ["grouped_matmul"]
