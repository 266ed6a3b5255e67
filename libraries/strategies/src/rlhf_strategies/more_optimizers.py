"""Options of the optimizers Muon and 8-bit AdamW, and of the schedule WSD. Imports only pydantic and core."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from rlhf_core.components import Component
from rlhf_core.config.problems import Problem
from rlhf_core.config.section import Section

from .optimizers import AdamWConfig

if TYPE_CHECKING:
    from rlhf_core.config.resolved import ResolvedRun

Fraction = Annotated[float, Field(ge=0, le=1)]


class MuonConfig(AdamWConfig):
    """`optimizer:` section for `name: muon`. `betas` and `eps` are those of AdamW, for all other parameters."""

    momentum: float = Field(0.95, ge=0, lt=1, description="Decay of the running mean of a matrix's gradients.")
    nesterov: bool = Field(True, description="Add the gradient once more to the mean (Nesterov momentum).")
    ns_steps: int = Field(5, ge=1, le=20, description="Newton-Schulz iterations, which orthogonalize the step.")
    adjust_lr: Literal["match_rms_adamw", "original"] = Field(
        "match_rms_adamw",
        description="Factor of a matrix's rate. match_rms_adamw: 0.2 sqrt(max(rows, columns)), so that lr is that of "
        "AdamW (Moonlight). original: sqrt(max(1, rows / columns)).",
    )
    adamw_names: list[str] = Field(
        ["embed", "wte", "wpe", "lm_head", "value_head", "score"],
        description="Parts of the names of matrices that AdamW trains: embeddings and heads.",
    )


class AdamW8BitConfig(AdamWConfig):
    """`optimizer:` section for `name: adamw-8bit`."""

    def check(self, run: ResolvedRun) -> Iterator[Problem]:
        yield from super().check(run)
        if run.strategy.name == "fsdp":
            problem = "keeps its state in blocks, which fsdp cannot shard"
            yield Problem("name", f"adamw-8bit {problem}", "use strategy single, torch-ddp or ddp, or optimizer adamw")


class WsdConfig(Section):
    """Options of the schedule `wsd`."""

    decay: float = Field(0.2, gt=0, le=1, description="Part of the updates, at the end, in which the rate falls.")
    shape: Literal["linear", "cosine", "sqrt"] = Field("linear", description="Shape of the fall.")
    floor: Fraction = Field(0.0, description="Final rate, as a fraction of the peak.")


muon = Component(
    summary="Muon: orthogonalized momentum for matrices, AdamW for vectors, embeddings and heads",
    config=MuonConfig,
    build="rlhf_strategies.muon:build",
    optimizer_bytes=4.0,
)
adamw_8bit = Component(
    summary="AdamW with 8-bit moments, by bitsandbytes",
    config=AdamW8BitConfig,
    build="rlhf_strategies.adamw_8bit:build",
    requires=("bitsandbytes",),
    optimizer_bytes=2.1,
)
wsd = Component("Constant at the peak rate, then a fall in the last part (WSD)", WsdConfig, "rlhf_strategies.wsd:build")
