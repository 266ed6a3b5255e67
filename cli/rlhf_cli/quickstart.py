"""Where `rlhf train` finds its run if it is given no run file: a plugin of the group `rlhf.quickstarts`."""

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
    """The object, or module, that the entry point `default` names."""

    def base_run(self, algorithm: str | None, environment: str | None) -> dict[str, Any]:
        """The run before flags change it."""

    def trainer_of(self, run: Mapping[str, Any]) -> Callable[..., TrainResult | None] | None:
        """`rlhf_core.train` for a run whose models are made first. None if the run has a model of the user's."""


def find_quickstart() -> Quickstart:
    """The installed quickstart. Raises `UserInputError` if there is none."""
    from rlhf_core.errors import UserInputError
    from rlhf_core.plugins.discovery import discover, find, import_target
    from rlhf_core.plugins.names import KNOWN

    if _NAME not in discover("quickstarts"):
        home = KNOWN["quickstarts"][_NAME]
        raise UserInputError(
            "there is no run file", hint=f"give one: RUN.yaml; or for the quickstart: pip install {home}"
        )
    return cast(Quickstart, import_target(find("quickstarts", _NAME)))


def trainer_of(run: Mapping[str, Any], resumed: Path | None) -> Callable[..., TrainResult | None] | None:
    """`rlhf_core.train` with the stages of the quickstart first; None if it has nothing to make for `run`.

    A run resumed from the folder `resumed` needs it only if that has a first stage and the run does not start from that
    stage's model yet.
    """
    if resumed is not None:
        made, model = resumed / _FIRST_STAGE, run.get("model")
        if not made.is_dir() or (isinstance(model, Mapping) and model.get("path") == str(made / "model")):
            return None
    return find_quickstart().trainer_of(run)
