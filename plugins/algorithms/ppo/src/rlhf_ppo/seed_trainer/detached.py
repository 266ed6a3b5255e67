"""`DetachedPPOTrainer`: ColossalChat's PPO trainer as a Ray actor. Needs `rlhf-ray`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlhf_core.components import HookContext
from rlhf_core.errors import RlhfError
from rlhf_core.hookspecs import FitInfo
from rlhf_core.plugins import load
from rlhf_core.types import Experience

try:
    import ray

    from rlhf_ray.actor_context import set_up_process
    from rlhf_ray.calls import own_name
    from rlhf_ray.detached_trainer import DetachedTrainer, FitPlan
    from rlhf_ray.ray_sync import MakerSync, SyncReport
except ModuleNotFoundError as error:
    hint = "pip install 'rlhf-ppo[ray]'"
    raise ImportError(f"DetachedPPOTrainer requires rlhf-ray, which is not installed: {hint}") from error

from ..config import PPOConfig
from .detached_learner import DetachedLearner

_SHARD_BYTES = 64 * 1024**2


class DetachedPPOTrainerBase(DetachedTrainer):
    """Class of the actor `DetachedPPOTrainer`. Subclass it to override steps, and decorate it with `ray.remote`.

    An overriding `training_step` may use `actor` and `critic` (as the strategy wrapped them), `actor_optim`,
    `critic_optim`, `actor_booster` and `critic_booster` (the result of `strategy_fn`), and `strategy` (the same, with a
    Booster adapted).
    """

    def __init__(
        self,
        experience_maker_holder_name_list: list[str],
        strategy_fn: Callable[[], Any],
        model_fn: Callable[[], tuple[nn.Module, nn.Module]],
        env_info: dict[str, str] | None = None,
        train_batch_size: int = 8,
        buffer_limit: int = 0,
        eps_clip: float = 0.2,
        value_clip: float = 0.4,
        dataloader_pin_memory: bool = True,
        callbacks: list[Any] = [],  # noqa: B006 - ColossalChat's default, never modified
        eval_performance: bool = False,
        debug: bool = False,
        update_lora_weights: bool = False,
        *,
        actor_lr: float = 1e-6,
        critic_lr: float = 5e-6,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        max_grad_norm: float | None = 1.0,
        gamma: float = 1.0,
        lam: float = 0.95,
        entropy_coef: float = 0.0,
        micro_batch_tokens: int | None = None,
        max_shard_bytes: int = _SHARD_BYTES,
        batch_timeout_seconds: float = 1800.0,
        actor_timeout_seconds: float = 60.0,
        sync_timeout_seconds: float = 600.0,
        seed: int = 0,
    ) -> None:
        super().__init__(
            experience_maker_holder_name_list,
            train_batch_size=train_batch_size,
            buffer_limit=buffer_limit,
            dataloader_pin_memory=dataloader_pin_memory,
            callbacks=callbacks,
            debug=debug,
            batch_timeout_seconds=batch_timeout_seconds,
            actor_timeout_seconds=actor_timeout_seconds,
            seed=seed,
        )
        if eval_performance:
            self.hooks.register(_performance_hook(), name="performance")
        set_up_process(env_info)
        config = PPOConfig(
            clip_eps=eps_clip, value_clip=value_clip, gamma=gamma, lam=lam, entropy_coef=entropy_coef, kl_coef=0.0
        )
        strategy = strategy_fn()
        self._learner = DetachedLearner(
            strategy,
            model_fn,
            config,
            lr={"policy": actor_lr, "critic": critic_lr},
            betas=betas,
            weight_decay=weight_decay,
            max_grad_norm=max_grad_norm,
            micro_batch_tokens=micro_batch_tokens,
        )
        self.strategy = self._learner.strategy
        self.actor_booster = self.critic_booster = strategy
        self.actor, self.actor_optim, _ = self._learner.trained["policy"]
        self.critic, self.critic_optim, _ = self._learner.trained["critic"]
        self._update_lora_weights = update_lora_weights
        self._max_shard_bytes = max_shard_bytes
        self._sync_to_makers = self._make_sync(sync_timeout_seconds)
        self._fitting = False

    def fit(self, total_steps: int, update_steps: int, train_epochs: int = 1) -> None:
        """Train as `DetachedTrainer.fit`. Call it with the same arguments on all trainers of a process group."""
        self._fitting = True
        try:
            super().fit(total_steps, update_steps, train_epochs)
        finally:
            self._fitting = False

    @ray.method(concurrency_group="compute")
    def training_step(self, experience: Experience) -> dict[str, float]:  # type: ignore[override]
        """Make one PPO update on a batch and return the losses of actor and critic before it."""
        metrics = self._learner.step(experience)
        return {"actor_loss": metrics["loss/policy"], "critic_loss": metrics["loss/value"]}

    @ray.method(concurrency_group="model_io")
    def strategy_save_actor(self, path: str, only_rank0: bool = False) -> None:
        """Write a folder for `AutoModelForCausalLM.from_pretrained`, LoRA merged. Collective.

        Args:
            path: Folder to write.
            only_rank0: Ignored, accepted for compatibility with ColossalChat. Rank 0 writes, the others help to
                gather.
        """
        self._save(lambda: self._learner.save("policy", Path(path)))

    @ray.method(concurrency_group="model_io")
    def strategy_save_critic(self, path: str, only_rank0: bool = False) -> None:
        """Write a folder for `Critic.from_pretrained`. Collective, as `strategy_save_actor`."""
        self._save(lambda: self._learner.save("critic", Path(path)))

    @ray.method(concurrency_group="model_io")
    def strategy_save_actor_optim(self, path: str, only_rank0: bool = False) -> None:
        """Write the actor's optimizer state to a folder. Collective, as `strategy_save_actor`."""
        self._save(lambda: self._learner.save_optimizer("policy", Path(path)))

    @ray.method(concurrency_group="model_io")
    def strategy_save_critic_optim(self, path: str, only_rank0: bool = False) -> None:
        """Write the critic's optimizer state to a folder. Collective, as `strategy_save_actor`."""
        self._save(lambda: self._learner.save_optimizer("critic", Path(path)))

    @ray.method(concurrency_group="model_io")
    def get_sync_report(self) -> SyncReport | None:
        """Report of the last weight sync (bytes, seconds, makers). None before the first."""
        return self._sync_to_makers.report

    def _update_remote_makers(self, fully_update: bool = False, **config: Any) -> None:
        """Send actor and critic as version `policy_version + 1`. Collective.

        Args:
            fully_update: Send all weights, not only the adapter.
            config: May contain `max_shard_bytes` for this call.
        """
        max_shard_bytes = config.pop("max_shard_bytes", self._max_shard_bytes)
        if config:
            raise TypeError(f"_update_remote_makers got {sorted(config)}, but accepts only max_shard_bytes")
        with self._learner.busy:
            self._sync_to_makers.send(
                self.policy_version + 1,
                self._own_makers(),
                adapter_only=self._update_lora_weights and not fully_update,
                max_shard_bytes=max_shard_bytes,
            )

    def _make_sync(self, timeout_seconds: float) -> MakerSync:
        trained = self._learner.trained
        adapters = {role: self._learner.trained_names(role) for role in trained} if self._update_lora_weights else {}
        return MakerSync(
            self.strategy, trained, adapters, self.makers, sender=own_name(), timeout_seconds=timeout_seconds
        )

    def _own_makers(self) -> list[str]:
        """Names of the makers this rank sends to. A maker listed by several ranks is served by the first."""
        strategy = self._learner.strategy
        gathered = strategy.all_gather_objects(list(self.makers.names))
        earlier = {name for names in gathered[: strategy.rank] for name in names}
        return [name for name in self.makers.names if name not in earlier]

    def _agree(self, outcome: Experience | str) -> Experience | str:
        reasons = self._learner.strategy.all_gather_objects(outcome if isinstance(outcome, str) else None)
        return next((reason for reason in reasons if reason is not None), outcome)

    def _step_device(self) -> torch.device:
        """CPU, because the updater splits batches and moves each micro-batch to the device."""
        return torch.device("cpu")

    def _save(self, save: Callable[[], None]) -> None:
        if self._fitting and self._learner.strategy.world_size > 1:
            raise RlhfError(
                "cannot save while several trainers fit: saving requires all of them to be at the same step",
                where="DetachedPPOTrainer",
                hint="wait for fit to finish, then save on every trainer",
            )
        save()

    def _fit_info(self, plan: FitPlan) -> FitInfo:
        strategy, learner = self._learner.strategy, self._learner
        return replace(
            super()._fit_info(plan),
            algorithm="ppo",
            samples_per_episode=plan.update_steps * self.train_batch_size * strategy.world_size,
            num_parameters={
                role: sum(p.numel() for p in learner.unwrapped(role).parameters()) for role in learner.trained
            },
            world_size=strategy.world_size,
            device=str(strategy.device),
        )


@ray.remote(  # type: ignore[call-overload]
    concurrency_groups={
        "buffer_length": 1,
        "buffer_append": 1,
        "buffer_sample": 1,
        "model_io": 1,
        "compute": 1,
    }
)
class DetachedPPOTrainer(DetachedPPOTrainerBase):
    """Ray actor that trains PPO on the output of `ExperienceMakerHolder` actors and sends them its weights.

    Start it under a name, so that the makers can find it. Several trainers form one process group if `env_info` is set
    (rank, world_size, local_rank, master_addr, master_port). Then call `fit`, `sync_…` and `strategy_save_…` on all of
    them. The KL coefficient is set on the makers and sent with each sample.

    Args:
        strategy_fn: Returns a core `Strategy` or a ColossalAI `Booster`.
        model_fn: Returns (actor, critic): a transformers causal LM and a `Critic`.
        train_batch_size: Samples per batch of this trainer.
        buffer_limit: Maximum number of waiting batches. 0 or less means unlimited.
        eps_clip, value_clip, gamma, lam, entropy_coef: As in `PPOConfig`. Advantages are whitened over all batches
            of an update, over all trainers of the process group.
        eval_performance: Print throughput at the end of a fit. Needs `rlhf-plan`.
        update_lora_weights: Send only the LoRA weights. `sync_models_to_remote_makers` always sends all.
        micro_batch_tokens: Maximum tokens per forward. None: a default. The result is the same.
        max_shard_bytes: Maximum bytes per chunk of weights.
        sync_timeout_seconds: Maximum time for a maker to receive a chunk.
    """


def _performance_hook() -> object:
    """Build the hook plugin `performance` of `rlhf-plan` and print its log output."""
    output = logging.getLogger("rlhf.performance")
    output.setLevel(logging.INFO)
    if not output.handlers:  # an earlier trainer in this process may have added one
        output.addHandler(logging.StreamHandler(sys.stdout))
    selected = load("hooks", "performance")
    hook: object = selected.build(selected.component.config(), HookContext(run_folder=Path()))
    return hook
