"""The hook plugin `model-card`: writes a model card into `model/` and `adapter/` when a run ends with a model."""

from __future__ import annotations

import logging
from pathlib import Path

from rlhf_core.hookspecs import Metrics, hookimpl

logger = logging.getLogger("rlhf.export")


@hookimpl
def rlhf_run_end(run_folder: Path, summary: Metrics | None) -> None:
    """Write the cards. An error is only logged, since it does not change the result of the run.

    Without a model in the summary, `model/` is missing or from an earlier part of the run.
    """
    if summary is None or summary.get("model") != "model":
        return
    from .card import write_run_cards

    try:
        write_run_cards(run_folder)
    except Exception as error:
        logger.warning("the model card was not written: %s", error)
        logger.debug("the model card failed", exc_info=error)
