from .scorer import RewardCombiner as RewardCombiner
from .scorer import RewardScorer as RewardScorer
from .scorer import RewardSpec as RewardSpec
from .scorer import reward_spec as reward_spec
