"""`TrainerSession`: one trainer process of a run, from loaded models to the final policy, with any transport."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..algorithm import DatasetAlgorithm, RolloutAlgorithm
from ..batching import fills_host_memory
from ..config.section import Section
from ..config.sections import OptimizerConfig
from ..errors import CheckpointError, DivergenceError, InterruptedRun
from ..hooks.relay import HookRelay
from ..hookspecs import FitInfo, Moment
from ..models.forward_passes import passes_of
from ..models.kinds import model_kind_of
from ..models.passes import GroupPasses
from ..protocols import ExperienceChannel
from ..rewards.scorer import RewardCombiner
from ..rollout.samples import SamplesLost
from ..rollout.weight_sync import SHARD_BYTES
from ..runfolder.checkpoint_state import RunState
from ..runfolder.checkpoints import CheckpointStore, OnlyModelError
from ..runfolder.folder import RunFolder
from ..util.host_memory import release_freed_memory
from ..util.jsonl import write_json
from ..wiring.models import updates_per_episode
from ..wiring.parts import TrainerParts
from .batches import BatchPlan, Units
from .checkpoint_saver import CheckpointSaver
from .dataset import DatasetSource
from .decisions import Decisions, RollBack, finish_facts, finished_by
from .estimates import EpisodeEstimator
from .live_options import LiveOptions
from .loop import EpisodeBatches, Metrics, SkippedUpdate, Trainer
from .record import EpisodeRecord
from .request import FitResult
from .updater import Updater

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger("rlhf")


class TrainerSession(Trainer[list[Any]]):
    """One trainer process of a run, from loaded models to the final policy. Only rank 0 writes files."""

    def __init__(
        self,
        run: TrainerParts,
        folder: RunFolder,
        *,
        hooks: HookRelay,
        publish: Callable[[int], None],
        makers: ExperienceChannel | None,
        interrupted: Callable[[], bool],
    ) -> None:
        """Create the session of this process.

        Args:
            run: Models, algorithm, strategy and inputs of this process.
            folder: The run folder.
            hooks: The run's hooks.
            publish: Called on every rank with a version. Sends the trained weights to all engines, each of which
                applies the version completely or not at all.
            makers: Source of samples and evaluations. None if the run generates nothing.
            interrupted: Returns whether the user has requested this process to stop.
        """
        super().__init__(hooks)
        self._run = run
        self._resolved = resolved = run.resolved
        self._folder = folder
        self._strategy = strategy = run.strategy
        self._algorithm = algorithm = run.inputs.algorithm
        self._send_weights = publish
        self._makers = makers
        scaling, train, plugin = resolved.run.reward_scaling, resolved.run.train, resolved.algorithm.label
        self._combiner = RewardCombiner(resolved.reward_weights, clip=scaling.clip, normalise=scaling.normalise)
        store = CheckpointStore(folder.checkpoints, keep=resolved.run.checkpoint.keep)
        for section in resolved.sections.values():
            store = section.typed(Section).checkpoint_store(store)
        self._saver = CheckpointSaver(run, store, self._combiner, hooks=hooks, makers=makers)
        self._live_options = LiveOptions(resolved.optimizer.typed(OptimizerConfig), run.trained, algorithm)
        self._decisions = Decisions(
            strategy, hooks, resolved, folder, self._live_options.set, lambda: interrupted() or store.has_failed
        )
        self._num_parameters = {role: strategy.num_parameters(each.model) for role, each in run.trained.items()}
        self._releases_memory = fills_host_memory(strategy.device.type, max(self._num_parameters.values()))
        tokens = train.micro_batch_tokens
        self._updater = Updater(algorithm, strategy, run.trained, micro_batch_tokens=tokens, plugin=plugin)
        sizes = train.train_batch_size, train.epochs_per_episode, strategy.rank, strategy.world_size
        plan = BatchPlan(*sizes, Units(algorithm.units, passes_of(strategy).price, plugin))
        self._dataset = DatasetSource(run, algorithm, plan) if isinstance(algorithm, DatasetAlgorithm) else None
        if isinstance(algorithm, RolloutAlgorithm):
            models = GroupPasses(strategy, run.models, batch_tokens=tokens)
            self._estimates = EpisodeEstimator(algorithm, self._combiner, strategy, plan, models=models, plugin=plugin)
        self._record = EpisodeRecord()
        self._num_samples: int | None = 0
        self._version = 0
        """Policy version that was published last."""
        self._gap_version: int | None = None
        """That version until the episode's first step, which measures the log-prob gap to it. Then None."""
        self._episode = 0
        self._eval_before: float | None = None
        self._eval_after: float | None = None
        self._evaluated_at: int | None = None
        """Value of `num_updates` at the last evaluation."""
        self._started = time.perf_counter()
        self._wall_before = 0.0

    def fit(self, resume: Path | None = None) -> FitResult:
        """Train to the end, from the start or from the checkpoint folder `resume`, and write the final policy.

        Raises `InterruptedRun` after Ctrl-C, once a checkpoint is written, and `GuardStop` if a hook plugin stops it.
        """
        with self._strategy.naming_lost_peers(), self._saver.store.finishing(self._strategy):
            first_episode = self._begin(resume)
            while True:
                try:
                    return self._fit_from(first_episode)
                except RollBack as request:
                    first_episode = self._roll_back(request)

    def _fit_from(self, first_episode: int) -> FitResult:
        with self._open_record(first_episode - 1) as self._record:
            if self._resolved.run.train.episodes > first_episode:
                self.run(self._fit_info(first_episode))
        if self._evaluated_at != self.num_updates:
            self._eval_after = self._evaluate().get("eval/score")
        self._save_model()
        return FitResult(self._eval_before, self._eval_after, self.num_updates, self._decisions.finished)

    def _open_record(self, episode: int) -> EpisodeRecord:
        """Open the record of the episodes after `episode`."""
        if not self._strategy.is_main:
            return EpisodeRecord()
        return EpisodeRecord.open(
            self._folder,
            self.hooks,
            step=self.num_updates,
            episode=episode,
            logging=self._resolved.run.logging,
            num_samples=self._num_samples,
        )

    # Methods of `Trainer`, called by the loop.

    def batches(self, episode: int) -> EpisodeBatches[list[Any]]:
        self._episode, self._gap_version = episode, self._version
        if self._dataset is not None:
            items, batches = self._dataset.episode(episode)
            self._record.items(items)
            return batches
        assert self._makers is not None
        while True:
            collected = self._makers.episode(episode)
            texts = self._record.texts(len(collected.rows))
            try:
                estimated = self._estimates.of(collected, self._version, texts=texts, timer=self._record.timer)
            except SamplesLost as lost:
                logger.warning("%s", lost)
                continue
            self._record.rollouts(episode, collected, estimated)
            return estimated

    def start_episode(self, episode: int, metrics: Metrics) -> None:
        self._record.start_episode(episode, self._version if self._resolved.rolls_out else None, metrics)
        self._release_memory()

    def step(self, batch: list[Any]) -> Metrics:
        try:
            with self._record.timer.phase("train"):
                gap_version, self._gap_version = self._gap_version, None
                return self._updater.update(batch, gap_version=gap_version)
        except DivergenceError as error:
            self._decide("failed-update", self._record.values, error)
            self._drop_gradients()
            raise SkippedUpdate(error.message) from error

    def after_update(self, metrics: Metrics) -> None:
        self._record.update(metrics)
        self.skips_rest = self._decide("update", self._record.values)

    def end_episode(self, episode: int) -> Metrics:
        """Publish the new policy, finish the episode's lines, evaluate and save if due, and stop if requested."""
        run = self._resolved.run
        self._release_memory()
        self._algorithm.end_episode()
        with self._record.timer.phase("sync"):
            self._publish(self._version + 1)
        metrics = self._record.end_episode(self._strategy)
        last = episode + 1 == run.train.episodes
        results: Metrics = {}
        if run.eval is not None and (last or _due(episode, run.eval.every_episodes)):
            results = self._evaluate()
        self._decide("episode", {**metrics, **results})
        interrupted, requested = self._decisions.interrupted, self._decisions.checkpoint_requested
        if self._decisions.finished is not None:
            last = self.is_finished = True
            results = results or self._evaluate()
        self._eval_after = results.get("eval/score") if last else None
        best = self._saver.improves({**metrics, **results})
        due = best is not None or last or interrupted or requested or _due(episode, run.checkpoint.every_episodes)
        self._record.flush(durable=due)
        if due:
            try:
                self._save(episode, best)
            except CheckpointError as error:
                raise self._save_only_model(error) from error
            self._decisions.checkpoint_requested = False
        if interrupted and not last:
            self._save_model()
            raise InterruptedRun(
                f"stopped after episode {episode + 1} of {run.train.episodes}. A checkpoint and the model are written",
                hint=f"continue with --output {self._folder.path} --resume auto",
            )
        return metrics

    def _release_memory(self) -> None:
        """Release host memory between rollouts and updates: a large model leaves a gigabyte that cannot be reused."""
        if self._releases_memory:
            release_freed_memory()

    def _save(self, episode: int, best_value: float | None = None) -> None:
        """Write the checkpoint after `episode`. `best_value`: its metric, if it is the best so far. Collective."""
        finished = self._decisions.finished
        self._saver.save(
            RunState(
                step=self.num_updates,
                next_episode=episode + 1,
                policy_version=self._version,
                eval_before=self._eval_before,
                algorithm=self._algorithm.state_dict(),
                combiner=self._combiner.state_dict(),
                wall_s=self._wall_before + time.perf_counter() - self._started,
                lr_factors=self._live_options.lr_factors,
                settings=self._live_options.settings,
                rollbacks=self._decisions.rollbacks,
                num_samples=self._record.num_samples,
                finished=None if finished is None else finish_facts(finished, self._resolved),
            ),
            best_value,
        )

    def _begin(self, resume: Path | None) -> int:
        """Load a checkpoint, or evaluate before training. Returns the first episode."""
        if resume is not None:
            state = self._load(resume)
            self._eval_before = state.eval_before
            self._wall_before = state.wall_s
            self._decisions.rollbacks = state.rollbacks
            if self._strategy.is_main and (changed := self._live_options.describe()):
                logger.warning("restored from the checkpoint, different from the run file: %s", changed)
            return state.next_episode if self._decisions.finished is None else self._resolved.run.train.episodes
        self._publish(0)
        before = self._evaluate()
        self._eval_before = before.get("eval/score")
        if before and self._strategy.is_main:
            write_json(self._folder.evaluation_before, dict(before))
        if self._decisions.may_roll_back():
            self._save(-1)  # a rollback needs a checkpoint
        return 0

    def _load(self, path: Path) -> RunState:
        state = self._saver.load(path)
        self._live_options.restore(state.lr_factors, state.settings)
        self.num_updates, self._num_samples = state.step, state.num_samples
        self._decisions.finished = finished_by(state, self._resolved)
        self._publish(state.policy_version)
        return state

    def _roll_back(self, request: RollBack) -> int:
        """Return to the last good checkpoint, with smaller learning rates. Returns its next episode. Collective."""
        path = self._decisions.allow_rollback(request, self._saver.last_good(request.moment.episode))
        factors, settings = dict(self._live_options.lr_factors), dict(self._live_options.settings)
        self._drop_gradients()
        state = self._load(path)
        self._live_options.restore(factors, settings)
        self._live_options.slow_down(request.action.lr_factor)
        self._evaluated_at = None
        self._decisions.log_rollback(request, state, self._live_options.lr_factors)
        return state.next_episode

    def _publish(self, version: int) -> None:
        """Send the current weights to the engines as `version`. Collective.

        Raises `SyncError` if a receiver keeps its old version.
        """
        with self.hooks.span("sync", version=version):
            self._send_weights(version)
        self._version = version
        if self._makers is not None and self._resolved.rolls_out:
            self._makers.published(version)

    def _drop_gradients(self) -> None:
        for trained in self._run.trained.values():
            self._strategy.drop_gradients(trained)

    def _decide(
        self, at: Literal["update", "failed-update", "episode"], metrics: Metrics, error: DivergenceError | None = None
    ) -> bool:
        """Take the decisions about this moment (`Decisions.take`)."""
        moment = Moment(at=at, step=self.num_updates, episode=self._episode, metrics=metrics, error=error)
        return self._decisions.take(moment)

    def _evaluate(self) -> Metrics:
        """Score held-out answers and, for a dataset, compute the losses on held-out records. Collective."""
        if self._resolved.run.eval is None:
            return {}
        with self.hooks.span("eval", step=self.num_updates) as span:
            metrics: dict[str, float] = {}
            if self._makers is not None and self._resolved.evaluation_sets:
                metrics.update(self._makers.evaluate())
            if self._dataset is not None and (items := self._dataset.held_out()):
                metrics.update({f"eval/{name}": value for name, value in self._updater.evaluate(items).items()})
            span.set("metrics", metrics)
        self._evaluated_at = self.num_updates
        self._record.evaluation(metrics)
        return metrics

    def _save_model(self) -> None:
        """Write `model/` (and `adapter/`) as a plain transformers folder, independent of the strategy. Collective."""
        weights: dict[str, Tensor] = {}
        for shard in self._strategy.state_dict_shards(self._run.models["policy"], SHARD_BYTES):
            if self._strategy.is_main:
                weights.update({name: tensor.detach().cpu() for name, tensor in shard.items()})
        inner = self._strategy.unwrap(self._run.models["policy"])
        tokenizer, folder = self._run.inputs.tokenizer, self._folder
        self._strategy.run_on_main(
            lambda: model_kind_of(inner).save_policy(inner, weights, tokenizer, folder.model, folder.adapter)
        )

    def _save_only_model(self, error: CheckpointError) -> CheckpointError:
        """Write the model, which is smaller than a checkpoint that failed. Returns the error to raise. Collective."""
        try:
            self._save_model()
        except CheckpointError as second:
            return CheckpointError(f"{error.message}, and {second.message}", where=error.where, hint=error.hint)
        written = f"The model after update {self.num_updates} is written"
        return OnlyModelError(
            f"{error.message}. {written}",
            where=error.where,
            hint=f"it is in {self._folder.model}. To continue from the previous checkpoint, if there is one, free "
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
