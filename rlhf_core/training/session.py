"""`TrainerSession`: one trainer process of a run, from loaded models to the final policy, whatever the transport."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..algorithm import Algorithm, DatasetAlgorithm, RolloutAlgorithm
from ..batching import default_tokens
from ..build import TrainerModels, build_reference, offloads_reference, updates_per_episode
from ..config.resolve import ResolvedRun
from ..errors import DivergenceError, InterruptedRun
from ..hooks.relay import HookRelay
from ..hookspecs import FitInfo
from ..models.batched_forward import no_reference, reference_pass, with_trainer_log_probs
from ..models.loading import save_plain_model
from ..rewards.scorer import RewardCombiner
from ..runfolder.checkpoint_state import RunState
from ..runfolder.checkpoints import CheckpointStore
from ..runfolder.folder import RunFolder
from ..strategy import Strategy
from ..types import BufferItem
from .checkpoint_saver import CheckpointSaver
from .control_loop import ControlLoop
from .guard_runner import GuardRunner, RollBack
from .live_options import LiveOptions
from .loop import BatchSource, Metrics, Trainer
from .record import EpisodeRecord
from .request import FitResult
from .request import SessionParts as SessionParts
from .sources import BatchPlan, DatasetSource, RolloutSource, TrainBatch
from .updater import Updater

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger("rlhf")
SHARD_BYTES = 512 * 1024**2


class TrainerSession:
    """Owns the loop's collaborators on one rank. Rank 0 writes; the others only compute."""

    def __init__(
        self,
        resolved: ResolvedRun,
        folder: RunFolder,
        *,
        strategy: Strategy,
        algorithm: Algorithm[Any, Any],
        models: TrainerModels,
        parts: SessionParts,
        hooks: HookRelay,
    ) -> None:
        self._resolved = resolved
        self._folder = folder
        self._strategy = strategy
        self._algorithm = algorithm
        self._models = models
        self._parts = parts
        self._hooks = hooks
        self._combiner = RewardCombiner(
            {reward.name: reward.weight for reward in resolved.rewards},
            clip=resolved.run.reward_scaling.clip,
            normalise=resolved.run.reward_scaling.normalise,
        )
        self._saver = CheckpointSaver(
            CheckpointStore(folder.checkpoints, keep=resolved.run.checkpoint.keep),
            strategy=strategy,
            trained=models.trained,
            algorithm=algorithm,
            combiner=self._combiner,
            channel=parts.channel,
            hooks=hooks,
            config=resolved.run.checkpoint,
        )
        self._live_options = LiveOptions(resolved.run.optimizer, models.trained, algorithm)
        self._guard_runner = GuardRunner(strategy, hooks, resolved.run.guards, folder)
        self._control = ControlLoop(folder, strategy, self._live_options.setters, parts.interrupted)
        self._tokens = resolved.run.train.micro_batch_tokens or default_tokens(strategy.device.type)
        self._updater = Updater(
            algorithm,
            strategy,
            models.trained,
            micro_batch_tokens=self._tokens,
            compiled=resolved.run.train.compile,
        )
        self._prepare = self._item_preparation()
        self._version = 0
        self._eval_before: float | None = None
        self._eval_after: float | None = None
        self._evaluated_at: int | None = None
        self._started = time.perf_counter()
        self._wall_before = 0.0
        self._episode = 0
        self._record: EpisodeRecord | None = None
        self._num_samples: int | None = 0
        self._trainer: Trainer[TrainBatch] | None = None

    def fit(self, resume: Path | None = None) -> FitResult:
        """Train to the end, from the start or from a checkpoint folder; write the final policy.

        Raises `InterruptedRun` after Ctrl-C, once a checkpoint is written, and `GuardStop` where a guard ends the run.
        """
        with self._strategy.naming_lost_peers():
            start = self._begin(resume)
            while True:
                try:
                    return self._fit_from(*start)
                except RollBack as request:
                    start = self._roll_back(request)

    def _fit_from(self, first_episode: int, step: int) -> FitResult:
        train = self._resolved.run.train
        with EpisodeRecord.open(
            self._folder if self._strategy.is_main else None,
            self._hooks,
            step=step,
            episode=first_episode - 1,
            keep_samples=self._resolved.run.logging.samples,
            num_samples=self._num_samples,
        ) as record:
            self._record = record
            self._guard_runner.restart()
            self._trainer = Trainer(
                self._guard_runner.watch(self._source(record)),
                self._train_step,
                hooks=self._hooks,
                recorder=self,
                num_updates=step,
            )
            if train.episodes > first_episode:
                self._trainer.fit(self._fit_info(first_episode))
        if self._evaluated_at != self._trainer.num_updates:
            self._eval_after = self._evaluate(self._trainer.num_updates).get("eval/score")
        self._save_model()
        return FitResult(self._eval_before, self._eval_after, self._trainer.num_updates)

    # Recorder: what the loop reports to.

    def start_episode(self, episode: int, metrics: Metrics) -> None:
        assert self._record is not None
        version = None if self._parts.channel is None else self._version
        self._episode = episode
        self._record.start_episode(episode, version, metrics)

    def update(self, metrics: Metrics) -> None:
        assert self._record is not None and self._trainer is not None
        self._record.update(metrics)
        step = self._trainer.num_updates
        self._guard_runner.after_update(step, self._episode, self._record.values)
        self._control.after_update(step, self._episode)

    def end_episode(self, episode: int) -> Metrics:
        """Publish the new policy, finish the episode's lines, evaluate and save when due, stop when asked."""
        assert self._record is not None and self._trainer is not None
        run = self._resolved.run
        self._algorithm.end_episode()
        self._publish(self._version + 1)
        metrics = self._record.end_episode(self._strategy)
        last = episode + 1 == run.train.episodes
        interrupted = self._control.agree(self._parts.interrupted() or self._control.stop_asked)
        results: Mapping[str, float] = {}
        # Also when interrupted: after a resume its scores could not be put on the line they belong to.
        if run.eval is not None and (last or _due(episode, run.eval.every_episodes)):
            results = self._evaluate(self._trainer.num_updates)
            self._record.evaluation(results)
            self._eval_after = results.get("eval/score") if last else None
        best = self._saver.improves({**metrics, **results})
        asked = self._control.checkpoint_asked
        due = best is not None or last or interrupted or asked or _due(episode, run.checkpoint.every_episodes)
        self._record.flush(durable=due)
        if due:
            self.save(episode, self._trainer.num_updates, best)
            self._control.checkpoint_asked = False
        if interrupted and not last:
            raise InterruptedRun(
                f"stopped after episode {episode + 1} of {run.train.episodes}; a checkpoint is written",
                hint=f"continue with --output {self._folder.path} --resume auto",
            )
        return metrics

    def save(self, episode: int, step: int, best_value: float | None = None) -> None:
        """Write the checkpoint that follows `episode`; `best_value`: it is the best so far. Collective."""
        self._saver.save(
            RunState(
                step=step,
                next_episode=episode + 1,
                policy_version=self._version,
                eval_before=self._eval_before,
                algorithm=self._algorithm.state_dict(),
                combiner=self._combiner.state_dict(),
                wall_s=self.wall_seconds,
                lr_factors=self._live_options.lr_factors,
                settings=self._live_options.settings,
                rollbacks=self._guard_runner.rollbacks,
                num_samples=0 if self._record is None else self._record.num_samples,
            ),
            best_value,
        )

    @property
    def wall_seconds(self) -> float:
        """Of the whole run, sessions before a resume included."""
        return self._wall_before + time.perf_counter() - self._started

    def _begin(self, resume: Path | None) -> tuple[int, int]:
        """Load a checkpoint or take the score before training. Returns (first episode, updates so far)."""
        if resume is not None:
            state = self._load(resume)
            self._eval_before = state.eval_before
            self._wall_before = state.wall_s
            self._guard_runner.rollbacks = state.rollbacks
            if self._strategy.is_main and (changed := self._live_options.describe()):
                logger.warning("as it was changed before the checkpoint: %s", changed)
            return state.next_episode, state.step
        self._publish(0)
        self._eval_before = self._evaluate(0).get("eval/score")
        if self._resolved.run.guards.rolling_back:
            self.save(-1, 0)  # somewhere to go back to
        return 0, 0

    def _load(self, path: Path) -> RunState:
        state = self._saver.load(path)
        self._live_options.restore(state.lr_factors, state.settings)
        self._version = state.policy_version
        self._num_samples = state.num_samples
        self._publish(state.policy_version)
        return state

    def _roll_back(self, request: RollBack) -> tuple[int, int]:
        """Go back to the last good checkpoint with smaller learning rates. Returns as `_begin` does. Collective."""
        path = self._saver.last_good(request.episode)
        self._guard_runner.allow_rollback(request, path)
        assert path is not None
        factors, settings = dict(self._live_options.lr_factors), dict(self._live_options.settings)
        for trained in self._models.trained.values():
            self._strategy.drop_gradients(trained)
        state = self._load(path)
        self._live_options.restore(factors, settings)
        self._live_options.slow_down(self._resolved.run.guards.rollback.lr_factor)
        self._evaluated_at = None
        self._guard_runner.tell_rollback(request, state, self._live_options.lr_factors)
        return state.next_episode, state.step

    def _source(self, record: EpisodeRecord) -> BatchSource[TrainBatch]:
        train = self._resolved.run.train
        plan = BatchPlan(
            train.train_batch_size, train.epochs_per_episode, self._strategy.rank, self._strategy.world_size
        )
        if isinstance(self._algorithm, RolloutAlgorithm):
            assert self._parts.channel is not None
            return RolloutSource(
                self._parts.channel,
                self._algorithm,
                self._combiner,
                plan,
                version=lambda: self._version,
                complete=self._complete,
                on_episode=record.rollouts,
            )
        assert isinstance(self._algorithm, DatasetAlgorithm)
        return self._dataset_source(self._algorithm, plan, record)

    def _dataset_source(
        self, algorithm: DatasetAlgorithm[Any, Any], plan: BatchPlan, record: EpisodeRecord
    ) -> DatasetSource:
        return DatasetSource(
            self._parts.prompts.record,
            algorithm,
            plan,
            items_per_episode=self._resolved.run.train.prompts_per_episode,
            encode=lambda line: algorithm.encode(line, self._models.tokenizer),
            prepare=self._prepare,
            on_episode=record.items,
        )

    def _complete(self, items: list[BufferItem]) -> list[BufferItem]:
        """The samples with the trainer's log-probs of them, where the algorithm asks for these. Collective."""
        assert isinstance(self._algorithm, RolloutAlgorithm) and self._record is not None
        if not self._algorithm.needs_trainer_log_probs:
            return items
        with self._record.timer.phase("train"):
            return with_trainer_log_probs(
                items,
                self._models.policy,
                self._strategy,
                temperature=self._resolved.sampling.temperature,
                batch_tokens=self._tokens,
            )

    def _item_preparation(self) -> Callable[[Sequence[Any]], Sequence[Any]]:
        """What a dataset's items go through before they are used, with the reference where one is needed."""
        algorithm = self._algorithm
        if not isinstance(algorithm, DatasetAlgorithm):
            return lambda items: items
        reference = build_reference(self._resolved, algorithm, self._strategy, self._models.policy)
        if reference is None:
            ask = no_reference(algorithm)
        else:
            offload = offloads_reference(self._resolved, self._strategy)
            ask = reference_pass(algorithm, reference, self._strategy, batch_tokens=self._tokens, offload=offload)
        return lambda items: algorithm.prepare_items(items, ask)

    def _train_step(self, batch: TrainBatch) -> dict[str, float]:
        assert self._record is not None and self._trainer is not None
        try:
            with self._record.timer.phase("train"):
                return self._updater.update(batch.items, gap_version=batch.gap_version)
        except DivergenceError as error:
            skipped = self._guard_runner.after_failed_update(
                self._trainer.num_updates, self._episode, self._record.values, error
            )
            for trained in self._models.trained.values():
                self._strategy.drop_gradients(trained)
            raise skipped from error

    def _publish(self, version: int) -> None:
        """Bring the trainer's weights to whoever generates, as `version`."""
        timer = None if self._record is None else self._record.timer
        with self._hooks.span("sync", version=version):
            if timer is None:
                self._parts.sync.publish(version, self._shards())
            else:
                with timer.phase("sync"):
                    self._parts.sync.publish(version, self._shards())
        self._version = version
        if self._parts.channel is not None:
            self._parts.channel.published(version)

    def _shards(self) -> Any:
        return self._strategy.state_dict_shards(self._models.policy, SHARD_BYTES)

    def _evaluate(self, step: int) -> Mapping[str, float]:
        """Greedy answers under the rewards and, for a dataset, the loss on held-out records."""
        if self._resolved.run.eval is None:
            return {}
        with self._hooks.span("eval", step=step) as span:
            metrics = {} if self._parts.evaluator is None else dict(self._parts.evaluator.evaluate())
            if isinstance(self._algorithm, DatasetAlgorithm):
                metrics.update(self._evaluate_dataset(self._algorithm))
            span.set("metrics", metrics)
        self._evaluated_at = step
        return metrics

    def _evaluate_dataset(self, algorithm: DatasetAlgorithm[Any, Any]) -> dict[str, float]:
        encoded = [algorithm.encode(line, self._models.tokenizer) for line in self._parts.prompts.held_out_records()]
        items = [item for item in encoded if item is not None]
        if not items:
            return {}
        items = list(self._prepare(items))
        mine = items[self._strategy.rank :: self._strategy.world_size] or [algorithm.masked(items[0])]
        return {f"eval/{name}": value for name, value in self._updater.evaluate(mine).items()}

    def _save_model(self) -> None:
        """Write `model/` (and `adapter/`): a plain transformers folder whatever the strategy. Collective."""
        weights: dict[str, Tensor] = {}
        for shard in self._shards():
            if self._strategy.is_main:
                weights.update({name: tensor.detach().cpu() for name, tensor in shard.items()})
        inner = self._strategy.unwrap(self._models.policy)
        self._strategy.run_on_main(lambda: save_plain_model(inner, weights, self._models.tokenizer, self._folder.model))

    def _fit_info(self, first_episode: int) -> FitInfo:
        train = self._resolved.run.train
        return FitInfo(
            algorithm=self._resolved.algorithm.name,
            num_episodes=train.episodes,
            first_episode=first_episode,
            samples_per_episode=train.samples_per_episode,
            updates_per_episode=updates_per_episode(train),
            num_parameters={
                role: sum(p.numel() for p in self._strategy.unwrap(model.model).parameters())
                for role, model in self._models.trained.items()
            },
            world_size=self._strategy.world_size,
            device=str(self._strategy.device),
            gradient_checkpointing=self._resolved.run.model.gradient_checkpointing,
        )


def _due(episode: int, every: int | None) -> bool:
    return every is not None and (episode + 1) % every == 0
