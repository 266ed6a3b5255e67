from .critic import Critic as Critic
from .seed_trainer.base import OLTrainer as OLTrainer
from .seed_trainer.detached import DetachedPPOTrainer as DetachedPPOTrainer
from .seed_trainer.detached import DetachedPPOTrainerBase as DetachedPPOTrainerBase
from .seed_trainer.trainer import PPOTrainer as PPOTrainer
