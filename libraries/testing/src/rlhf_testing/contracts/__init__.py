"""Core's requirements on plugins as tests: one class per kind of plugin, to subclass in three lines.

    from rlhf_testing.contracts import RewardContract

    class TestBrevity(RewardContract):
        plugin = "brevity"
        options = {"target_tokens": 8}

Plugins are loaded as in a run: the entry point's name, the component, its options, `build`. Run the tests with pytest.
`--rlhf-device cuda` puts models on a GPU. Suites are imported on first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
