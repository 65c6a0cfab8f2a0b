"""RMS norm of every head, gated."""

from .api import gated_rms_norm

__all__ = ["gated_rms_norm"]
