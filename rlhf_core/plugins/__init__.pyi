from .discovery import load as load
from .discovery import resolve_build as resolve_build
