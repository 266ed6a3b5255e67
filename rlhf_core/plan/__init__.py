"""`rlhf plan`: what a run will need, estimated before a weight is loaded."""

from .estimate import Plan, ProcessPlan, plan_run

__all__ = ["Plan", "ProcessPlan", "plan_run"]
