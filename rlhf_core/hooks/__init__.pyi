from .installed import load_hook_plugins as load_hook_plugins
from .installed import register_listed as register_listed
from .relay import HookRelay as HookRelay
