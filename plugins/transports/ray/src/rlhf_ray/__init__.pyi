from .cluster import local_ray as local_ray
from .detached_trainer import DetachedTrainer as DetachedTrainer
from .experience_maker_holder import ExperienceMakerHolder as ExperienceMakerHolder
from .replay_buffer import DetachedReplayBuffer as DetachedReplayBuffer
