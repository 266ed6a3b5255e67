from .inputs import RunInputs as RunInputs
from .models import build_strategy as build_strategy
from .models import model_dtype as model_dtype
from .parts import RunParts as RunParts
from .parts import TrainerParts as TrainerParts
