"""`rlhf plan`: what a run will need, estimated before a weight is loaded."""

from .estimate import Plan, plan_run
from .layouts import Layout
from .work import ProcessPlan

__all__ = ["Layout", "Plan", "ProcessPlan", "plan_run"]
