"""Process groups and collectives. One process is the trivial case: rank 0 of 1, every collective the identity."""

from tidemill.parallel.gloo import GlooGroup, PeerLostError
from tidemill.parallel.groups import Group, ParallelContext, SoloGroup, share, single

__all__ = ["GlooGroup", "Group", "ParallelContext", "PeerLostError", "SoloGroup", "share", "single"]
