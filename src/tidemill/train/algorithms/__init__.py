"""Pure functions of tensors: advantages, token losses, aggregation, corrections, KL estimators, group filters.

Suffixes: G samples of one prompt's group, B sequences, T tokens. `mask` is 1 where the policy sampled the token.
"""

from tidemill.train.algorithms.advantages import ADVANTAGES, group_advantages
from tidemill.train.algorithms.aggregation import AGGREGATIONS, Denominators, aggregate, denominators
from tidemill.train.algorithms.corrections import truncated_importance_weights
from tidemill.train.algorithms.filters import GroupFilter, keep_group, soft_overlong_penalty
from tidemill.train.algorithms.kl import kl_k1, kl_k2, kl_k3
from tidemill.train.algorithms.losses import LOSSES, PolicyLoss, policy_loss

__all__ = [
    "ADVANTAGES", "AGGREGATIONS", "LOSSES", "Denominators", "GroupFilter", "PolicyLoss", "aggregate", "denominators",
    "group_advantages", "keep_group", "kl_k1", "kl_k2", "kl_k3", "policy_loss", "soft_overlong_penalty",
    "truncated_importance_weights",
]
