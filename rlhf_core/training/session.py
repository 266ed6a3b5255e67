"""`TrainerSession`: one trainer process of a run, from loaded models to the final policy, under any transport."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..algorithm import DatasetAlgorithm, RolloutAlgorithm
from ..batching import default_tokens, fills_host_memory
from ..errors import CheckpointError, DivergenceError, InterruptedRun
from ..hooks.relay import HookRelay
from ..hookspecs import FitInfo, Moment
from ..models.forward_passes import passes_of
from ..models.loading import save_plain_model
from ..rewards.scorer import RewardCombiner
from ..rollout.weight_sync import SHARD_BYTES
from ..runfolder.checkpoint_state import RunState
from ..runfolder.checkpoints import CheckpointStore, OnlyModelError
from ..runfolder.folder import RunFolder
from ..util.host_memory import release_freed_memory
from ..util.jsonl import write_json
from ..wiring.models import updates_per_episode
from ..wiring.parts import TrainerParts
from .batches import BatchPlan, TrainBatch
from .checkpoint_saver import CheckpointSaver, PluginState
from .dataset_source import DatasetSource
from .decisions import Decisions, RollBack, finish_facts, finished_by
from .evaluation import HeldOutEvaluation
from .live_options import LiveOptions
from .loop import BatchSource, Metrics, SkippedUpdate, Trainer
from .publisher import PolicyPublisher
from .record import EpisodeRecord
from .request import FitResult, SessionParts
from .sources import build_rollout_source
from .units import Units
from .updater import Updater

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger("rlhf")


class TrainerSession:
    """Owns the loop's collaborators on one rank. Rank 0 writes; the others only compute."""

    def __init__(self, run: TrainerParts, folder: RunFolder, *, parts: SessionParts, hooks: HookRelay) -> None:
        self._run = run
        self._resolved = resolved = run.resolved
        self._folder = folder
        self._strategy = strategy = run.strategy
        self._algorithm = algorithm = run.inputs.algorithm
        self._parts = parts
        self._hooks = hooks
        scaling, train = resolved.run.reward_scaling, resolved.run.train
        self._combiner = RewardCombiner(resolved.reward_weights, clip=scaling.clip, normalise=scaling.normalise)
        self._saver = CheckpointSaver(
            CheckpointStore(folder.checkpoints, keep=resolved.run.checkpoint.keep),
            strategy=strategy,
            trained=run.trained,
            algorithm=algorithm,
            combiner=self._combiner,
            channel=parts.channel,
            config=resolved.run.checkpoint,
            plugins=PluginState(hooks, parts.states, strategy),
        )
        self._live_options = LiveOptions(resolved.run.optimizer, run.trained, algorithm)
        self._decisions = Decisions(strategy, hooks, resolved, folder, self._live_options.setters, parts.interrupted)
        self._num_parameters = {
            role: sum(p.numel() for p in strategy.unwrap(each.model).parameters()) for role, each in run.trained.items()
        }
        largest = max(self._num_parameters.values())
        self._tokens = train.micro_batch_tokens or default_tokens(strategy.device.type, largest)
        self._releases_memory = fills_host_memory(strategy.device.type, largest)
        self._updater = Updater(
            algorithm,
            strategy,
            run.trained,
            micro_batch_tokens=self._tokens,
            plugin=resolved.algorithm.label,
        )
        self._publisher = PolicyPublisher(parts.sync, hooks, parts.channel)
        sizes = train.train_batch_size, train.epochs_per_episode, strategy.rank, strategy.world_size
        units = Units(algorithm.units, passes_of(strategy).price, resolved.algorithm.label)
        self._plan = BatchPlan(*sizes, units)
        self._dataset = self._dataset_source()
        self._evaluation = HeldOutEvaluation(
            algorithm,
            strategy,
            self._updater,
            hooks,
            evaluator=parts.evaluator,
            items=lambda: [] if self._dataset is None else self._dataset.held_out(),
        )
        self._eval_before: float | None = None
        self._eval_after: float | None = None
        self._started = time.perf_counter()
        self._wall_before = 0.0
        self._episode = 0
        self._record: EpisodeRecord | None = None
        self._num_samples: int | None = 0
        self._trainer: Trainer[TrainBatch] | None = None

    def fit(self, resume: Path | None = None) -> FitResult:
        """Train to the end, from the start or from a checkpoint folder; write the final policy.

        Raises `InterruptedRun` after Ctrl-C, once a checkpoint is written, and `GuardStop` where a hook plugin ends it.
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
            sample_tokens=self._resolved.run.logging.sample_tokens,
            num_samples=self._num_samples,
        ) as record:
            self._record = record
            self._trainer = Trainer(
                self._source(record),
                self._train_step,
                hooks=self._hooks,
                recorder=self,
                num_updates=step,
            )
            if train.episodes > first_episode:
                self._trainer.fit(self._fit_info(first_episode))
        if self._evaluation.last_step != self._trainer.num_updates:
            self._eval_after = self._evaluate(self._trainer.num_updates).get("eval/score")
        self._save_model()
        return FitResult(self._eval_before, self._eval_after, self._trainer.num_updates, self._decisions.finished)

    # Recorder: called by the loop.

    def start_episode(self, episode: int, metrics: Metrics) -> None:
        assert self._record is not None
        version = None if self._parts.channel is None else self._publisher.version
        self._episode = episode
        self._record.start_episode(episode, version, metrics)
        self._release_memory()

    def update(self, metrics: Metrics) -> None:
        assert self._record is not None and self._trainer is not None
        self._record.update(metrics)
        self._trainer.skips_rest = self._decisions.take(self._moment("update", self._record.values))

    def end_episode(self, episode: int) -> Metrics:
        """Publish the new policy, finish the episode's lines, evaluate and save when due, stop when asked."""
        assert self._record is not None and self._trainer is not None
        run = self._resolved.run
        self._release_memory()
        self._algorithm.end_episode()
        self._publisher.publish(self._publisher.version + 1, self._record.timer)
        metrics = self._record.end_episode(self._strategy)
        num_updates = self._trainer.num_updates
        last = episode + 1 == run.train.episodes
        results: Mapping[str, float] = {}
        if run.eval is not None and (last or _due(episode, run.eval.every_episodes)):
            results = self._evaluate(num_updates)
            self._record.evaluation(results)
        self._decisions.take(self._moment("episode", {**metrics, **results}))
        interrupted, asked = self._decisions.interrupted, self._decisions.checkpoint_asked
        if self._decisions.finished is not None:
            last = self._trainer.is_finished = True
            if not results:
                results = self._evaluate(num_updates)
                self._record.evaluation(results)
        self._eval_after = results.get("eval/score") if last else None
        best = self._saver.improves({**metrics, **results})
        due = best is not None or last or interrupted or asked or _due(episode, run.checkpoint.every_episodes)
        self._record.flush(durable=due)
        if due:
            try:
                self.save(episode, num_updates, best)
            except CheckpointError as error:
                raise self._ended_by(error) from error
            self._decisions.checkpoint_asked = False
        if interrupted and not last:
            self._save_model()
            raise InterruptedRun(
                f"stopped after episode {episode + 1} of {run.train.episodes}; a checkpoint is written, and the model",
                hint=f"continue with --output {self._folder.path} --resume auto",
            )
        return metrics

    def _release_memory(self) -> None:
        """Between rollouts and updates: a large model leaves a gigabyte behind that the other cannot use."""
        if self._releases_memory:
            release_freed_memory()

    def save(self, episode: int, step: int, best_value: float | None = None) -> None:
        """Write the checkpoint after `episode`; `best_value`: its metric, if it is the best so far. Collective."""
        finished = self._decisions.finished
        self._saver.save(
            RunState(
                step=step,
                next_episode=episode + 1,
                policy_version=self._publisher.version,
                eval_before=self._eval_before,
                algorithm=self._algorithm.state_dict(),
                combiner=self._combiner.state_dict(),
                wall_s=self.wall_seconds,
                lr_factors=self._live_options.lr_factors,
                settings=self._live_options.settings,
                rollbacks=self._decisions.rollbacks,
                num_samples=0 if self._record is None else self._record.num_samples,
                finished=None if finished is None else finish_facts(finished, self._resolved),
            ),
            best_value,
        )

    @property
    def wall_seconds(self) -> float:
        """Wall time of the whole run, including sessions before a resume."""
        return self._wall_before + time.perf_counter() - self._started

    def _begin(self, resume: Path | None) -> tuple[int, int]:
        """Load a checkpoint, or evaluate before training. Returns (first episode, updates so far)."""
        if resume is not None:
            state = self._load(resume)
            self._eval_before = state.eval_before
            self._wall_before = state.wall_s
            self._decisions.rollbacks = state.rollbacks
            if self._strategy.is_main and (changed := self._live_options.describe()):
                logger.warning("as it was changed before the checkpoint: %s", changed)
            episodes = self._resolved.run.train.episodes
            return state.next_episode if self._decisions.finished is None else episodes, state.step
        self._publisher.publish(0)
        before = self._evaluate(0)
        self._eval_before = before.get("eval/score")
        if before and self._strategy.is_main:
            write_json(self._folder.evaluation_before, dict(before))
        if self._decisions.may_roll_back():
            self.save(-1, 0)  # what it goes back to
        return 0, 0

    def _load(self, path: Path) -> RunState:
        state = self._saver.load(path)
        self._live_options.restore(state.lr_factors, state.settings)
        self._num_samples = state.num_samples
        self._decisions.finished = finished_by(state, self._resolved)
        self._publisher.publish(state.policy_version)
        return state

    def _roll_back(self, request: RollBack) -> tuple[int, int]:
        """Go back to the last good checkpoint with smaller learning rates. Returns as `_begin` does. Collective."""
        path = self._saver.last_good(request.moment.episode)
        self._decisions.allow_rollback(request, path)
        assert path is not None
        factors, settings = dict(self._live_options.lr_factors), dict(self._live_options.settings)
        for trained in self._run.trained.values():
            self._strategy.drop_gradients(trained)
        state = self._load(path)
        self._live_options.restore(factors, settings)
        self._live_options.slow_down(request.action.lr_factor)
        self._evaluation.last_step = None
        self._decisions.tell_rollback(request, state, self._live_options.lr_factors)
        return state.next_episode, state.step

    def _source(self, record: EpisodeRecord) -> BatchSource[TrainBatch]:
        if self._dataset is not None:
            return self._dataset
        assert isinstance(self._algorithm, RolloutAlgorithm) and self._parts.channel is not None
        return build_rollout_source(
            self._parts.channel,
            self._algorithm,
            self._combiner,
            self._plan,
            policy=self._run.models["policy"],
            place=self._strategy,
            batch_tokens=self._tokens,
            timer=record.timer,
            version=lambda: self._publisher.version,
            texts=record.texts,
            on_episode=record.rollouts,
            plugin=self._resolved.algorithm.label,
        )

    def _dataset_source(self) -> DatasetSource | None:
        if not isinstance(self._algorithm, DatasetAlgorithm):
            return None

        def on_episode(episode: int, items: Sequence[Any]) -> None:
            assert self._record is not None
            self._record.items(episode, items)

        return DatasetSource(self._run, self._algorithm, self._plan, on_episode=on_episode)

    def _train_step(self, batch: TrainBatch) -> dict[str, float]:
        assert self._record is not None and self._trainer is not None
        try:
            with self._record.timer.phase("train"):
                return self._updater.update(batch.items, gap_version=batch.gap_version)
        except DivergenceError as error:
            self._decisions.take(self._moment("failed-update", self._record.values, error))
            for trained in self._run.trained.values():
                self._strategy.drop_gradients(trained)
            raise SkippedUpdate(error.message) from error

    def _moment(
        self, at: Literal["update", "failed-update", "episode"], metrics: Metrics, error: DivergenceError | None = None
    ) -> Moment:
        assert self._trainer is not None
        return Moment(at=at, step=self._trainer.num_updates, episode=self._episode, metrics=metrics, error=error)

    def _evaluate(self, step: int) -> Mapping[str, float]:
        return {} if self._resolved.run.eval is None else self._evaluation.evaluate(step)

    def _save_model(self) -> None:
        """Write `model/` (and `adapter/`): a plain transformers folder whatever the strategy. Collective."""
        weights: dict[str, Tensor] = {}
        for shard in self._strategy.state_dict_shards(self._run.models["policy"], SHARD_BYTES):
            if self._strategy.is_main:
                weights.update({name: tensor.detach().cpu() for name, tensor in shard.items()})
        inner = self._strategy.unwrap(self._run.models["policy"])
        tokenizer, folder = self._run.inputs.tokenizer, self._folder
        self._strategy.run_on_main(
            lambda: save_plain_model(inner, weights, tokenizer, folder.model, adapter=folder.adapter)
        )

    def _ended_by(self, error: CheckpointError) -> CheckpointError:
        """Write the model, as a checkpoint could not be: it is much smaller. Returns the error to raise. Collective."""
        assert self._trainer is not None
        try:
            self._save_model()
        except CheckpointError as second:
            return CheckpointError(f"{error.message}; {second.message}", where=error.where, hint=error.hint)
        written = f"the model after update {self._trainer.num_updates} is written"
        return OnlyModelError(
            f"{error.message}; {written}",
            where=error.where,
            hint=f"it is in {self._folder.model}; to go on from the checkpoint before, if there is one, free some "
            f"space and start again with --resume auto",
        )

    def _fit_info(self, first_episode: int) -> FitInfo:
        train = self._resolved.run.train
        return FitInfo(
            algorithm=self._resolved.algorithm.name,
            num_episodes=train.episodes,
            first_episode=first_episode,
            samples_per_episode=train.samples_per_episode,
            updates_per_episode=updates_per_episode(train),
            num_parameters=self._num_parameters,
            world_size=self._strategy.num_processes,
            device=str(self._strategy.device),
            gradient_checkpointing=self._resolved.run.model.gradient_checkpointing,
        )


def _due(episode: int, every: int | None) -> bool:
    return every is not None and (episode + 1) % every == 0
