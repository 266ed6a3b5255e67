"""The hook `products`: which library multiplied float32 matrices on the CPU, in the manifest of the run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from rlhf_core import hookimpl
from rlhf_core.components import Component, HookContext
from rlhf_core.config import Section
from rlhf_core.runfolder import RunFolder

logger = logging.getLogger("rlhf")

EVENT = "products"
"""Kind of the event in the manifest."""


class ProductsRecord:
    """Adds one event after the first episode, and warns on a resume that computes otherwise."""

    def __init__(self, config: Section, context: HookContext) -> None:
        self._folder = RunFolder(context.run_folder)
        self._is_recorded = False

    @hookimpl
    def rlhf_episode_end(self, metrics: Mapping[str, Any] | None) -> None:
        from rlhf_passes import chosen_products

        chosen = chosen_products()
        if chosen is None or metrics is None or self._is_recorded:
            return
        earlier = self._folder.events(EVENT)
        if earlier and earlier[-1].get("library") != chosen["library"]:
            logger.warning(
                "matrix products are computed by %s, before this resume by %s: results differ in the last bits. "
                "`train.deterministic: true` computes alike on every machine",
                chosen["library"],
                earlier[-1].get("library"),
            )
        self._folder.add_event(EVENT, chosen)
        self._is_recorded = True


products = Component(
    summary="Records in the manifest which library multiplied float32 matrices on the CPU.",
    config=Section,
    build="rlhf_torch.products:ProductsRecord",
    always_on=True,
)
