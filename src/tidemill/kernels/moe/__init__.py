"""Mixture of experts: routing, dispatch, experts, balancing."""

from tidemill.kernels.moe.balance import NUM_BINS, BiasHistogram, required_bias
from tidemill.kernels.moe.dispatch import Dispatch, plan_dispatch
from tidemill.kernels.moe.experts import ExpertLora, experts
from tidemill.kernels.moe.routing import route, route_train
from tidemill.kernels.moe.train import experts_train

__all__ = [
    "NUM_BINS",
    "BiasHistogram",
    "Dispatch",
    "ExpertLora",
    "experts",
    "experts_train",
    "plan_dispatch",
    "required_bias",
    "route",
    "route_train",
]
