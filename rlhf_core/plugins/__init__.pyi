from .functions import function_of_file as function_of_file
from .selected import load as load
