from .calling import RewardCaller as RewardCaller
from .calling import RewardSpec as RewardSpec
from .scorer import RewardCombiner as RewardCombiner
from .scorer import RewardScorer as RewardScorer
from .scorer import make_reward_spec as make_reward_spec
