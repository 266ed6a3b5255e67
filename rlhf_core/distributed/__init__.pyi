from .interrupts import stop_signals as stop_signals
from .launch_env import read_launch_env as read_launch_env
from .loopback import is_loopback as is_loopback
from .parent_watch import end_with_parent as end_with_parent
