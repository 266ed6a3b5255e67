"""For every test: how fast an example runs is the machine's affair, so hypothesis fails none for its time."""

from hypothesis import HealthCheck, settings

settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-machine")
