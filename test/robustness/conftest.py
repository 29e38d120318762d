import os

from hypothesis import HealthCheck, settings

# The same examples in every run, and no clock: a busy machine must not turn a test red. New ones, and more of them,
# with HYPOTHESIS_PROFILE=search.
_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile(
    "ci", max_examples=40, derandomize=True, deadline=None, database=None, suppress_health_check=_SLOW
)
settings.register_profile("search", max_examples=2000, deadline=None, suppress_health_check=_SLOW)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
