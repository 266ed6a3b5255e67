from .installed import register_hooks as register_hooks
from .relay import HookRelay as HookRelay
