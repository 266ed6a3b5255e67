from .discovery import load as load
from .discovery import resolve_build as resolve_build
from .functions import load_function_file as load_function_file
