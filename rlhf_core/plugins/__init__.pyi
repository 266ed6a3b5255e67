from .discovery import load as load
from .discovery import resolve_build as resolve_build
from .functions import function_of_file as function_of_file
