from .generation import sampling_params as sampling_params
from .generation import set_eos as set_eos
from .loaders import CycledLoader as CycledLoader
from .loaders import batches_of as batches_of
from .prompts import BatchReader as BatchReader
from .rewards import NeuralReward as NeuralReward
from .rewards import seed_reward as seed_reward
from .strategies import strategy_by_name as strategy_by_name
