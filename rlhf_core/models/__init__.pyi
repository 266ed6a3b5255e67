from .forward_passes import ForwardPasses as ForwardPasses
from .kinds import ModelKind as ModelKind
from .kinds import model_kind_for as model_kind_for
from .kinds import model_kind_of as model_kind_of
from .passes import GroupPasses as GroupPasses
