"""Short causal depthwise convolution."""

from tidemill.kernels.conv.ref import WIDTH, short_conv, short_conv_rows
from tidemill.kernels.conv.train import halo, short_conv_train

__all__ = ["WIDTH", "halo", "short_conv", "short_conv_rows", "short_conv_train"]
