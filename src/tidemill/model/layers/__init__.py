"""The layers of the text model in their training form: whole sequences with gradients, or new tokens after a past."""

from tidemill.model.layers.decoder import DecoderLayer, mixture, pick
from tidemill.model.layers.kda import KimiDeltaAttention
from tidemill.model.layers.linear import Linear, RMSNorm, Weight
from tidemill.model.layers.mla import LatentAttention
from tidemill.model.layers.mlp import GatedMLP
from tidemill.model.layers.moe import LatentMoE, RoutedExperts, Router

__all__ = [
    "DecoderLayer",
    "GatedMLP",
    "KimiDeltaAttention",
    "LatentAttention",
    "LatentMoE",
    "Linear",
    "RMSNorm",
    "RoutedExperts",
    "Router",
    "Weight",
    "mixture",
    "pick",
]
