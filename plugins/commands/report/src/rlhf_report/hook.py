"""The hook plugin `report`: writes `report.html` when a run ends, with success or failure."""

from __future__ import annotations

import logging
from pathlib import Path

from rlhf_core.hookspecs import Metrics, hookimpl

logger = logging.getLogger("rlhf.report")


@hookimpl(trylast=True)
def rlhf_run_end(run_folder: Path, summary: Metrics | None) -> None:
    """Write the page after all other hooks, since it shows their files.

    Without a summary, the run folder was removed and no page is written. An error is only logged, since it does not
    change the result of the run.
    """
    import rlhf_report

    if summary is None:
        return
    try:
        rlhf_report.build_report([run_folder])
    except Exception as error:
        logger.warning(
            "%s was not written: %s\n  -> to try again: rlhf report %s", run_folder / "report.html", error, run_folder
        )
        logger.debug("the report failed", exc_info=error)
