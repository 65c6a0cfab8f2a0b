"""Short depthwise causal convolution with carried windows."""

from .reference import decode_causal_conv1d, dense_causal_conv1d, ragged_causal_conv1d

__all__ = ["decode_causal_conv1d", "dense_causal_conv1d", "ragged_causal_conv1d"]
