"""Write the files of a `PPOTrainer`: atomic checkpoints in `save_dir/step-N/`, and logs in `log_dir`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rlhf_core.components import HookContext
from rlhf_core.errors import CheckpointError, UserInputError
from rlhf_core.hooks import HookRelay
from rlhf_core.plugins import load
from rlhf_core.runfolder import (
    CheckpointStore,
    RunState,
    find_complete_checkpoint,
    load_channel_state,
    load_run_state,
    save_run_state,
)
from rlhf_core.training import EpisodeRecord
from rlhf_core.util import read_lines
from rlhf_models import is_lora, stored_dtype, write_model_config

from .parts import TrainerContext
from .saving import save_actor

_KEEP_ALL = 1 << 30
_METRICS = "metrics.jsonl"
_WITH_ADAPTER = "policy-with-adapter"
"""Folder of a LoRA policy for resuming, with base and adapter separate. In `policy` they are merged."""


class TrainerCheckpoints:
    """Save and load the state of a trainer. Every call is collective."""

    def __init__(
        self,
        folder: Path,
        context: TrainerContext,
    ) -> None:
        self._folder = folder
        self._store = CheckpointStore(folder, keep=_KEEP_ALL)
        self._strategy = context.strategy
        self._tokenizer = context.tokenizer
        self._policy = context.trained["policy"].model
        self._is_lora = is_lora(context.strategy.unwrap(self._policy))
        name = _WITH_ADAPTER if self._is_lora else "policy"
        self._trained = {name if role == "policy" else role: each for role, each in context.trained.items()}
        """Models by folder name. `policy` is the folder that transformers loads."""

    def save(self, state: RunState, progress: Mapping[str, Any]) -> Path:
        """Write `step-<state.step>`, with the position of the loaders in `progress`. Return the folder."""
        with self._store.writing(state.step, self._strategy) as partial:
            save_run_state(partial, state, progress, self._trained, self._strategy)
            if self._is_lora:
                save_actor(self._strategy, self._policy, partial / "policy")
            self._strategy.run_on_main(lambda: self._complete_policy(partial / "policy"))
        return self._store.path(state.step)

    def load(self, path: Path | None) -> tuple[RunState, dict[str, Any]]:
        """Restore models, optimizers and schedulers from `path`, or from the newest complete checkpoint.

        Raises:
            CheckpointError: The folder contains no checkpoint.
            UserInputError: The checkpoint at `path` is damaged.
        """
        chosen = self._store.newest() if path is None else find_complete_checkpoint(path)
        if chosen is None:
            where = str(path or self._folder)
            raise CheckpointError("contains no checkpoint", where=where, hint="is save_interval above 0?")
        return load_run_state(chosen, self._trained, self._strategy), load_channel_state(chosen) or {}

    def _complete_policy(self, folder: Path) -> None:
        """Write config and tokenizer next to the policy's weights, so that transformers can load the folder."""
        policy: Any = self._strategy.unwrap(self._policy)
        if not self._is_lora:
            write_model_config(policy, stored_dtype(folder), folder)
        self._tokenizer.save_pretrained(folder)


def open_record(
    log_dir: str | Path | None, *, use_wandb: bool, is_main: bool, step: int, hooks: HookRelay, stack: ExitStack
) -> EpisodeRecord:
    """Open the record of a fit that continues after update `step`.

    Without `log_dir`, and on ranks other than 0, nothing is written. If `log_dir` contains another fit's metrics, this
    fit gets a subfolder. `stack` closes the record and unregisters its loggers.

    Raises:
        UserInputError: A logger's package is missing, or `use_wandb` is set without `log_dir`.
    """
    if log_dir is None and use_wandb:
        raise UserInputError("use_wandb needs a log_dir", where="PPOTrainer.fit", hint='log_dir="./logs"')
    if log_dir is None or not is_main:
        return EpisodeRecord()
    folder = _folder(Path(log_dir), step)
    folder.mkdir(parents=True, exist_ok=True)
    context = HookContext(run_folder=folder, run={})
    for name, options in {"tensorboard": {"folder": "."}, **({"wandb": {}} if use_wandb else {})}.items():
        selected = load("loggers", name)
        logger = selected.build(selected.component.config.model_validate(options), context)
        stack.callback(hooks.unregister, hooks.register(logger, name=name))

    return stack.enter_context(EpisodeRecord(folder / _METRICS, hooks, step=step))


def _folder(log_dir: Path, step: int) -> Path:
    """`log_dir`, or the first of its subfolders `fit-2`, `fit-3`, … if it contains metrics that this fit does not
    continue.
    """
    candidates = (log_dir if number == 1 else log_dir / f"fit-{number}" for number in range(1, 1 << 20))
    return next(folder for folder in candidates if _continues(folder / _METRICS, step))


def _continues(path: Path, step: int) -> bool:
    if not path.exists():
        return True
    steps = [int(line["step"]) for line in read_lines(path)]
    return step > 0 and step in steps
