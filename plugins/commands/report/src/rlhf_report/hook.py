"""The hook plugin `report`: writes `report.html` when a run ends, however it ends."""

from __future__ import annotations

import logging
from pathlib import Path

from rlhf_core.hookspecs import Metrics, hookimpl

logger = logging.getLogger("rlhf.report")


@hookimpl(trylast=True)
def rlhf_run_end(run_folder: Path, summary: Metrics | None) -> None:
    """Last, since the page shows what other hooks wrote. A run whose folder is gone has no summary, and gets no page.

    An error is logged: the run ended as its summary says, whatever becomes of the page.
    """
    import rlhf_report

    if summary is None:
        return
    try:
        rlhf_report.build_report([run_folder])
    except Exception as error:
        logger.warning(
            "%s is not written: %s\n  -> to try again: rlhf report %s", run_folder / "report.html", error, run_folder
        )
        logger.debug("the report failed", exc_info=error)
