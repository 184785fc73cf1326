"""Shared by all tests: fixed Hypothesis profile, one torch thread."""

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "ci", deadline=None, derandomize=True, max_examples=40, suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ci")

os.environ.setdefault("OMP_NUM_THREADS", "1")
