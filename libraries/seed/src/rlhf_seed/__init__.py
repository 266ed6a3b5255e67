"""Code shared by ColossalChat's classes: `**generate_kwargs`, prompt loaders, reward models, strategies, callbacks."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
