"""The core of the rlhf framework: types, protocols, hooks, configuration and one training loop.

Names are imported when they are first used (`__init__.pyi` lists them): `import rlhf_core` loads nothing else of core.
What a plugin may import is in `docs/reference/plugin-api.md`; everything else is private and may move.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
