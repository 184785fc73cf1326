"""Gated multi-head latent attention without positions: absorbed over pages (engine), expanded (training)."""

from tidemill.kernels.mla.absorbed import PAGE, PagePlan, absorbed, head_matmul, plan_pages
from tidemill.kernels.mla.expanded import expanded

__all__ = ["PAGE", "PagePlan", "absorbed", "expanded", "head_matmul", "plan_pages"]
