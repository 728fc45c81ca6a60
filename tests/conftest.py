"""Settings for every test: examples are the same in every run, and no example is timed."""

from hypothesis import HealthCheck, settings

settings.register_profile("weir", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("weir")
