"""`PPOTrainer`: PPO on models, optimizers and data loaders created by the caller, through the one training loop."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedTokenizerBase

from rlhf_core.batching import collate, split
from rlhf_core.errors import RlhfError, UserInputError
from rlhf_core.hookspecs import FitInfo
from rlhf_core.runfolder import RunState
from rlhf_core.strategy import TrainedModel
from rlhf_core.training import Metrics
from rlhf_core.types import BufferItem, Experience
from rlhf_models import disable_dropout
from rlhf_objective import TextLoader
from rlhf_seed import BatchReader, CycledLoader, sampling_params, set_eos

from ..algorithm import PPO
from ..config import PPOConfig
from .base import OLTrainer, SampleBuffer
from .checkpoint import TrainerCheckpoints, open_record
from .parts import TrainerContext, build_estimates, build_generation, build_updater
from .setup import Batching, Models, Rollouts, check_numbers, check_tensor_parallel, config_of

logger = logging.getLogger("rlhf")

ROWS_PER_COLLECT_STEP = 1 << 20
"""Sample ids reserved for one collect step, so that no two (step, rank, row) share an id."""


class PPOTrainer(OLTrainer):
    """ColossalChat's PPO trainer, with its parameters, methods and defaults.

    Models, optimizers and schedulers must be prepared (`strategy.prepare` or `booster.boost`). `actor_booster` and
    `critic_booster` are the objects that prepared them, and may be the same. `reward_model` is a neural reward model, a
    function of rollouts or the name of an installed reward. `initial_model` is the KL reference. None with a LoRA actor
    uses the actor with its adapter off.

    `train_batch_size` counts samples per trainer process and forward. `accumulation_steps` such batches, of one pass or
    several, make one optimizer step, with the loss normalized over all their tokens. Batches left at an episode's end
    make a smaller step. `buffer_limit` is the maximum number of an episode's samples per process (0: unlimited), beyond
    which the oldest are dropped. With `sample_buffer`, an update step draws one random batch instead of passing over
    the buffer in order. `save_interval` counts optimizer steps. `apply_loss_mask=False` divides each answer's loss by
    the maximum answer length instead of by real tokens. `generate_kwargs`: `max_length` (prompt and response together),
    `max_new_tokens`, `temperature`, `top_k`, `top_p`, `do_sample`, `stop`, `stop_token_ids`, `eos_token_id`.

    Not in ColossalChat: `options` (options of the algorithm beyond these parameters, which they may not contradict),
    `engine` (name of the rollout engine), `samples_per_prompt`, and `seed` of all sampling.

    A subclass may override `_before_fit`, `_make_experience`, `_training_step`, `_learn` and `_save_checkpoint`. They
    may use `actor`, `critic`, `actor_booster`, `critic_booster`, `actor_optim`, `critic_optim`, `actor_scheduler`,
    `critic_scheduler`, `tokenizer`, `device`, `data_buffer`, `accumulation_steps`, `completes_update`,
    `num_train_step`, and, during `fit`, `experience_maker`. Dropout is off in actor and critic, because the importance
    ratio must compare the same function.
    """

    def __init__(
        self,
        actor_booster: Any,
        critic_booster: Any,
        actor: nn.Module,
        critic: nn.Module,
        reward_model: Any,
        initial_model: nn.Module | None,
        actor_optim: Optimizer,
        critic_optim: Optimizer,
        actor_lr_scheduler: LRScheduler | None,
        critic_lr_scheduler: LRScheduler | None,
        tokenizer: PreTrainedTokenizerBase,
        kl_coef: float = 0.1,
        ptx_coef: float = 0.9,
        train_batch_size: int = 8,
        buffer_limit: int = 0,
        buffer_cpu_offload: bool = True,
        eps_clip: float = 0.2,
        vf_coef: float = 1.0,
        value_clip: float = 0.2,
        sample_buffer: bool = False,
        dataloader_pin_memory: bool = True,
        offload_inference_models: bool = True,
        apply_loss_mask: bool = True,
        accumulation_steps: int = 1,
        save_interval: int = 0,
        save_dir: str | None = None,
        use_tp: bool = False,
        coordinator: Any = None,
        callbacks: list[Any] = [],  # noqa: B006 - ColossalChat's default, only read
        *,
        options: PPOConfig | None = None,
        engine: str = "hf",
        samples_per_prompt: int = 1,
        seed: int = 0,
        **generate_kwargs: Any,
    ) -> None:
        values = {"kl_coef": kl_coef, "clip_eps": eps_clip, "vf_coef": vf_coef, "value_clip": value_clip}
        config = config_of(options, values, ptx_coef=ptx_coef, apply_loss_mask=apply_loss_mask)
        models = Models(actor_booster, critic_booster, actor, critic, reward_model, initial_model)
        trained = {
            "policy": TrainedModel(actor, actor_optim, actor_lr_scheduler),
            "critic": TrainedModel(critic, critic_optim, critic_lr_scheduler),
        }
        batching = Batching(train_batch_size, accumulation_steps, buffer_cpu_offload, sample_buffer)
        sampling = sampling_params(generate_kwargs, tokenizer)
        rollouts = Rollouts(sampling, engine, samples_per_prompt, seed, offload_inference_models)
        check_numbers(batching, rollouts, save_interval, save_dir)
        check_tensor_parallel(use_tp, actor_booster, critic_booster)
        set_eos(actor, generate_kwargs.get("eos_token_id"))
        data_buffer = SampleBuffer(train_batch_size, buffer_limit, seed=seed)
        super().__init__(actor_booster, critic_booster, data_buffer, sample_buffer, dataloader_pin_memory, callbacks)
        strategy = models.strategy(trained, config.kl_coef)
        pin_memory = dataloader_pin_memory and strategy.device.type == "cuda"
        longest = min(sampling.max_new_tokens, sampling.max_length or sampling.max_new_tokens)
        self._context = TrainerContext(
            models=models,
            batching=batching,
            rollouts=rollouts,
            tokenizer=tokenizer,
            trained=trained,
            strategy=strategy,
            algorithm=PPO(config, temperature=sampling.temperature, max_new_tokens=longest, pin_memory=pin_memory),
            hooks=self.hooks,
        )
        self._save_interval = save_interval
        self._checkpoints = None if save_dir is None else TrainerCheckpoints(Path(save_dir), self._context)
        self.coordinator = coordinator
        self._set_state()

    def _set_state(self) -> None:
        """Set the attributes that subclasses use, and the initial state."""
        context = self._context
        self._ptx_coef = context.algorithm.config.ptx_coef
        self.actor, self.actor_optim, self.actor_scheduler = context.trained["policy"]
        self.critic, self.critic_optim, self.critic_scheduler = context.trained["critic"]
        self.tokenizer = context.tokenizer
        self.accumulation_steps = context.batching.accumulation_steps
        self.device = context.strategy.device
        self._reader = BatchReader(context.tokenizer, context.tokenizer, needs_mask=True)
        self._num_collected = 0
        self._first_episode = 0
        self._batches_before = {"prompt": 0, "pretrain": 0}
        """Number of batches consumed from the loaders before a resume."""
        self._at_episode_start = {"num_collected": 0, **self._batches_before}
        """Positions of the loaders at the start of the current episode."""
        self._save_is_due = False
        self._pending: list[BufferItem] = []
        """Samples of the batches since the last optimizer step."""
        self._wall_before_s = 0.0
        self._started = time.perf_counter()
        self._fit = ExitStack()

    def fit(
        self,
        num_episodes: int,
        num_collect_steps: int,
        num_update_steps: int,
        prompt_dataloader: Iterable[Any],
        pretrain_dataloader: Iterable[Mapping[str, Any]] | None = None,
        log_dir: str | None = None,
        use_wandb: bool = False,
    ) -> None:
        """Train for `num_episodes` episodes.

        Args:
            num_episodes: Number of episodes. After `load_checkpoint`, it includes those before the checkpoint.
            num_collect_steps: Batches of prompts per episode.
            num_update_steps: Passes over the collected samples, or, with `sample_buffer`, random batches of them.
            prompt_dataloader: Batches of prompts, see `rlhf_seed.BatchReader`.
            pretrain_dataloader: Batches of pretraining text for the ptx loss.
            log_dir: Folder for `metrics.jsonl` and TensorBoard events.
            use_wandb: Also log to W&B.

        Raises:
            UserInputError: A count is below 1, or `ptx_coef` > 0 without a `pretrain_dataloader`.
        """
        counts = {
            "num_episodes": num_episodes,
            "num_collect_steps": num_collect_steps,
            "num_update_steps": num_update_steps,
        }
        for name, count in counts.items():
            if count < 1:
                raise UserInputError(f"must be at least 1, got {count}", where=f"PPOTrainer.fit, {name}")
        with ExitStack() as self._fit:
            self._before_fit(prompt_dataloader, pretrain_dataloader, log_dir, use_wandb)
            self._at_episode_start = self._progress()
            self._pending, self._save_is_due = [], False
            self._generation = build_generation(self._context, self._fit)
            self.experience_maker = self._generation.maker
            self._updater = build_updater(self._context)
            self._estimates = build_estimates(self._context, self._generation, num_update_steps)
            self._num_collect_steps, self._num_passes = num_collect_steps, num_update_steps
            self._publish()
            with self._context.strategy.naming_lost_peers():
                self.run(self._fit_info(num_episodes))
        self._first_episode = 0

    def load_checkpoint(self, path: str | Path | None = None) -> int:
        """Resume from a checkpoint that `_save_checkpoint` wrote.

        Args:
            path: Folder `step-N`. None is the newest in `save_dir`.

        Returns:
            Number of the first episode of the next `fit`.

        Raises:
            CheckpointError: No checkpoint was found.
            UserInputError: The checkpoint is damaged, or neither `path` nor `save_dir` is set.
        """
        if path is not None:
            checkpoints, chosen = TrainerCheckpoints(Path(path).parent, self._context), Path(path)
        elif self._checkpoints is not None:
            checkpoints, chosen = self._checkpoints, None
        else:
            raise UserInputError("is None, so path is required", where="PPOTrainer.save_dir", hint="pass path=…")
        state, progress = checkpoints.load(chosen)
        self._context.algorithm.load_state_dict(state.algorithm)
        self.num_updates = self.num_train_step = state.step
        self._version = state.policy_version
        self._first_episode, self._wall_before_s = state.next_episode, state.wall_s
        self._num_collected = int(progress["num_collected"])
        self._batches_before = {name: int(progress[name]) for name in self._batches_before}
        return state.next_episode

    # ColossalChat's steps, which a subclass may override.

    def _before_fit(
        self,
        prompt_dataloader: Iterable[Any],
        pretrain_dataloader: Iterable[Mapping[str, Any]] | None = None,
        log_dir: str | None = None,
        use_wandb: bool = False,
    ) -> None:
        """Wrap the loaders, open the logs, and put the models in training mode."""
        before, self._batches_before = self._batches_before, dict.fromkeys(self._batches_before, 0)
        self.prompt_dataloader = CycledLoader(prompt_dataloader, where="prompt_dataloader", skip=before["prompt"])
        self.pretrain_dataloader: CycledLoader[Mapping[str, Any]] | None = None
        if self._ptx_coef > 0:
            if pretrain_dataloader is None:
                raise UserInputError(
                    f"ptx_coef is {self._ptx_coef}, but fit got no pretrain_dataloader",
                    where="PPOTrainer.ptx_coef",
                    hint="pass pretrain_dataloader=… to fit, or ptx_coef=0.0 to the trainer",
                )
            loader = CycledLoader(pretrain_dataloader, where="pretrain_dataloader", skip=before["pretrain"])
            self.pretrain_dataloader = loader
            self._context.algorithm.use_pretraining(TextLoader(loader))
        self._record = open_record(
            log_dir,
            use_wandb=use_wandb,
            is_main=self._context.strategy.is_main,
            step=self.num_train_step,
            hooks=self.hooks,
            stack=self._fit,
        )
        for model in (self.actor, self.critic):
            disable_dropout(model)
            model.train()

    def _make_experience(self, collect_step: int) -> Experience:
        """Sample answers to the next batch of prompts. Return rewards, reference log-probs and values on the CPU."""
        strategy = self._context.strategy
        place = self._num_collected * strategy.world_size + strategy.rank
        self._num_collected += 1
        batch = next(self.prompt_dataloader)
        prompts = self._reader.read(batch, place * ROWS_PER_COLLECT_STEP, "prompt_dataloader")
        items = [item for group in self.experience_maker.make(prompts) for item in group.items]
        if not items:
            raise RlhfError("the reward dropped every sample of a collect step", where="PPOTrainer.reward_model")
        return collate(sorted(items, key=lambda item: item.sample_id))

    def _learn(self, update_step: int) -> None:
        """Make one pass over the buffer (or take one random batch) and call `_training_step` for each batch."""
        self._generation.release_inference_models()
        super()._learn(update_step)

    def _training_step(self, experience: Experience) -> None:
        """Add at most `train_batch_size` samples to the update, and run the update if the batch `completes_update`."""
        self._pending += split(experience, to_cpu=self._context.batching.buffer_cpu_offload)
        if self.completes_update:
            items, self._pending = self._pending, []
            gap_version, self._gap_version = self._gap_version, None
            with self._record.timer.phase("train"):
                self._metrics = self._updater.update(items, gap_version=gap_version)

    def _save_checkpoint(self, episode: int = 0) -> None:
        """Write `save_dir/step-N`: actor and critic, optimizers, schedulers and running states.

        `episode` is the number of completed episodes. A checkpoint within an episode resumes at that episode's first
        prompt.
        """
        if self._checkpoints is None:
            raise UserInputError("is required to save a checkpoint", where="PPOTrainer.save_dir")
        state = RunState(
            step=self.num_train_step,
            next_episode=episode,
            policy_version=self._version,
            eval_before=None,
            algorithm=self._context.algorithm.state_dict(),
            combiner={},
            wall_s=self._wall_before_s + time.perf_counter() - self._started,
        )
        path = self._checkpoints.save(state, self._at_episode_start)
        if self._context.strategy.is_main:
            self._log(f"saved actor and critic with running states to {path}")

    def _progress(self) -> dict[str, int]:
        pretrain = self.pretrain_dataloader
        return {
            "num_collected": self._num_collected,
            "prompt": self.prompt_dataloader.num_taken,
            "pretrain": 0 if pretrain is None else pretrain.num_taken,
        }

    def after_update(self, metrics: Metrics) -> None:
        """Save a checkpoint if due. At an episode's last step, wait until the episode is finished."""
        self._record.update(metrics)
        if self._save_interval > 0 and self.num_train_step % self._save_interval == 0:
            if self._ends_episode:
                self._save_is_due = True
            else:
                self._record.flush(durable=True)
                self._save_checkpoint(self._episode)

    def _log(self, message: str) -> None:
        if self.coordinator is None:
            logger.info("%s", message)
        else:
            self.coordinator.print_on_master(message)

    def _publish(self) -> None:
        with self.hooks.span("sync", version=self._version):
            self._generation.publish(self._version)

    def _fit_info(self, num_episodes: int) -> FitInfo:
        strategy = self._context.strategy
        return FitInfo(
            algorithm="ppo",
            num_episodes=num_episodes,
            first_episode=self._first_episode,
            num_parameters={role: strategy.num_parameters(each.model) for role, each in self._context.trained.items()},
            world_size=strategy.world_size,
            device=str(strategy.device),
        )

    def end_episode(self, episode: int) -> Metrics:
        """Adapt the KL coefficient, publish the policy, and save if due. Return the episode's final metrics."""
        self._context.algorithm.end_episode()
        self._version += 1
        with self._record.timer.phase("sync"):
            self._publish()
        metrics = self._record.end_episode(self._context.strategy)
        self.data_buffer.clear()
        self._at_episode_start = self._progress()
        due, self._save_is_due = self._save_is_due, False
        self._record.flush(durable=due)
        if due:
            self._save_checkpoint(episode + 1)
        return metrics
