from .interrupts import stop_signals as stop_signals
from .launch_env import read_launch_env as read_launch_env
