"""Mixture of experts: routing, dispatch, experts, balancing."""

from tidemill.kernels.moe.dispatch import Dispatch, plan_dispatch
from tidemill.kernels.moe.experts import ExpertLora, SituAct, experts
from tidemill.kernels.moe.routing import route, route_train

__all__ = ["Dispatch", "ExpertLora", "SituAct", "experts", "plan_dispatch", "route", "route_train"]
