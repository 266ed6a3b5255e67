"""The quickstart, which `rlhf train` runs without a run file: a plugin of the group `rlhf.quickstarts`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    from pathlib import Path

    from rlhf_core.entry.train import TrainResult

_NAME = "default"
_FIRST_STAGE = "warm-start"
"""Folder of the quickstart's first stage, in its run folder."""


class Quickstart(Protocol):
    """Interface of the object or module that the entry point `default` names."""

    def base_run(self, algorithm: str | None, environment: str | None) -> dict[str, Any]:
        """Return the run before flags change it."""

    def trainer_of(self, run: Mapping[str, Any]) -> Callable[..., TrainResult | None] | None:
        """Return `train` with stages before it that make the run's models. None if the user chose a model."""

    def expected_minutes(self, run: Mapping[str, Any]) -> int | None:
        """Return the minutes that the run takes on two CPU cores with all of its stages. None if not known."""


def find_quickstart() -> Quickstart:
    """Return the installed quickstart, or raise `UserInputError`."""
    from rlhf_core.errors import UserInputError
    from rlhf_core.plugins.discovery import discover, find, import_target
    from rlhf_core.plugins.names import KNOWN

    if _NAME not in discover("quickstarts"):
        home = KNOWN["quickstarts"][_NAME]
        raise UserInputError(
            "no run file specified", hint=f"specify RUN.yaml, or for the quickstart: pip install {home}"
        )
    return cast(Quickstart, import_target(find("quickstarts", _NAME)))


def trainer_of(run: Mapping[str, Any], resumed: Path | None) -> Callable[..., TrainResult | None] | None:
    """Return `rlhf_core.train` preceded by the stages of the quickstart. None if `run` does not need a stage.

    A run resumed from the folder `resumed` needs the stages only if the folder contains the first one and the run does
    not yet start from that stage's model.
    """
    if resumed is not None:
        stage, model = resumed / _FIRST_STAGE, run.get("model")
        if not stage.is_dir() or (isinstance(model, Mapping) and model.get("path") == str(stage / "model")):
            return None
    return find_quickstart().trainer_of(run)
