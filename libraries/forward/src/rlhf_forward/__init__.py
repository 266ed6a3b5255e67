"""Forward passes of policies, critics and score models, and the functions of tensors around them.

Legend: B sequences, S prompt and response tokens, A response tokens, V vocabulary, K kept tokens. A mask is named
for what True means. Log-probs are in nats and float32.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
