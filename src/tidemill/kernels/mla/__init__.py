"""Gated multi-head latent attention without positions: absorbed over pages (engine), expanded (training)."""

from tidemill.kernels.mla.absorbed import PAGE, PagePlan, absorbed, head_matmul, plan_pages
from tidemill.kernels.mla.expanded import QUERIES, expanded
from tidemill.kernels.mla.tiled import TilePlan, absorbed_tiles, plan_tiles, tokens_per_tile

__all__ = [
    "PAGE", "QUERIES", "PagePlan", "TilePlan", "absorbed", "absorbed_tiles", "expanded", "head_matmul", "plan_pages",
    "plan_tiles", "tokens_per_tile",
]
