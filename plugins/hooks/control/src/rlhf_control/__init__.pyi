from .control_box import ControlBox as ControlBox
from .control_box import parse_command as parse_command
