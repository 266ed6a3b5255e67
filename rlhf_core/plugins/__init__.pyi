from .functions import function_from_file as function_from_file
from .selected import load as load
