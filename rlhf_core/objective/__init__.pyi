from .estimate import check_groups as check_groups
from .estimate import estimated as estimated
from .policy import PolicyObjective as PolicyObjective
from .policy import PolicyTerms as PolicyTerms
