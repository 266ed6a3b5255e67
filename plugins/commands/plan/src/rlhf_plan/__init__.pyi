from .estimate import Plan as Plan
from .estimate import plan_run as plan_run
from .layouts import Layout as Layout
from .memory import ProcessPlan as ProcessPlan
