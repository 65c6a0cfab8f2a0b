"""Short depthwise causal convolution with carried windows."""

from .api import decode_causal_conv1d, ragged_causal_conv1d
from .reference import dense_causal_conv1d

__all__ = ["decode_causal_conv1d", "dense_causal_conv1d", "ragged_causal_conv1d"]
