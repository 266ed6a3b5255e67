"""The core of the rlhf framework: types, protocols, hooks, configuration and one training loop.

Names are imported on first use (`__init__.pyi` lists them), so `import rlhf_core` loads no other module of core.
`docs/reference/plugin-api.md` lists the names a plugin may import. All others are private and may change.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
