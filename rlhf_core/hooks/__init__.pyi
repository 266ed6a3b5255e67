from .installed import load_hook_plugins as load_hook_plugins
from .relay import HookRelay as HookRelay
