"""No deadlines: a first call compiles nothing here, but machines are shared."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "shared", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "thorough", deadline=None, max_examples=5000, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("shared")
