from .forward_passes import ForwardPasses as ForwardPasses
from .kinds import ModelKind as ModelKind
from .kinds import kind_for as kind_for
from .kinds import kind_of as kind_of
from .passes import GroupPasses as GroupPasses
