"""Code shared by the seed's classes: `**generate_kwargs`, batches of a prompt loader, reward models."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
