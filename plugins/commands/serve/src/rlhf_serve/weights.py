"""Which weights a run folder, or a model folder, has to serve."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from rlhf_core.config import ModelConfig
from rlhf_core.errors import DataError, UserInputError
from rlhf_core.runfolder import RunFolder, whole_checkpoint

_STEP = re.compile(r"step-\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenModel:
    """Which weights are served."""

    config: ModelConfig
    weights: Path | None = None
    """Folder of a checkpoint whose weights replace those that `config` names."""

    @property
    def label(self) -> str:
        """How messages call it."""
        return self.config.path if self.weights is None else str(self.weights.parent)


def choose_model(path: str, *, best: bool = False, device: str = "auto") -> ChosenModel:
    """The weights of a run folder, or a model folder, hub name or `builtin:NAME`.

    Of a run that is done: its final model, of another its newest checkpoint; with `best`, what `checkpoint.best` chose.
    No code that a run folder names is run. Raises `UserInputError`.
    """
    folder = RunFolder(Path(path))
    if not folder.holds_run:
        if best:
            raise UserInputError("only a run has a best checkpoint", where="--best", hint="give a run folder")
        return ChosenModel(config=ModelConfig(path=path, device=device))
    folder.refuse_oddities()
    final = ChosenModel(config=ModelConfig(path=str(folder.model), device=device)) if folder.model.is_dir() else None
    if final is not None and not best and folder.read_json(folder.summary).get("status") == "done":
        return final
    checkpoint = _best(folder) if best else whole_checkpoint(folder.path)
    if checkpoint is None:
        if final is not None:
            return final
        raise UserInputError(
            "this run has written no model and no checkpoint yet",
            where=path,
            hint="wait for one: checkpoint.every_episodes says when they are written",
        )
    model = folder.read_config().get("model")
    given = model if isinstance(model, dict) else {}
    try:
        kept = {key: given.get(key) for key in ("path", "lora", "chat")}
        config = ModelConfig.model_validate({**kept, "device": device})
    except ValidationError as error:
        raise DataError("does not say which model the run trains", where=str(folder.config)) from error
    return ChosenModel(config=config, weights=checkpoint / "policy")


def _best(folder: RunFolder) -> Path:
    named = folder.checkpoints / "best"
    name = named.read_text(encoding="utf-8").strip() if named.is_file() else ""
    if not _STEP.fullmatch(name):
        raise UserInputError(
            "this run has no best checkpoint",
            where=str(folder.path),
            hint="checkpoint.best in its run file names the metric that chooses one; or leave --best out",
        )
    best = whole_checkpoint(folder.checkpoints / name)
    if best is None:
        raise UserInputError(f"the best checkpoint, {name}, is gone", where=str(folder.path), hint="leave --best out")
    return best
