from .installed import register_all as register_all
from .relay import HookRelay as HookRelay
