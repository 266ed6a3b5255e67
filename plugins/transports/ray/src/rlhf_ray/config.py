"""Options of the transport `ray`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from rlhf_core.config import OwnProcesses, Problem, ResolvedRun, TransportConfig

_MOST_LANES = 32
"""Each is a thread, and with an isolated environment a process."""


class RayConfig(TransportConfig):
    """How many actors, where they are placed, how weights reach the makers, and every deadline."""

    removed: ClassVar[Mapping[str, str]] = {
        "placement": "trainers that reserve CPUs or GPUs are placed close together; remove it",
        **dict.fromkeys(
            ("canary_prompts", "log_prob_gap_bound"),
            "guards.log_prob_gap watches rollout/logprob_gap_max with every transport; remove it",
        ),
    }

    num_makers: int = Field(1, ge=1, le=1024, description="Actors that sample and score answers.")
    num_trainers: int = Field(1, ge=1, le=1024, description="Actors that train, as one process group.")
    max_staleness: int = Field(
        1,
        ge=0,
        le=64,
        description="Policy versions a sample may be behind the trainer that learns from it; 0 is strictly on-policy.",
    )
    prompts_per_lease: int | None = Field(
        None, ge=1, description="Prompts a maker takes at once; null shares an episode evenly among the makers."
    )

    address: str | None = Field(
        None,
        min_length=1,
        description="A running Ray cluster (`auto`, host:port, ray://…); null is a local one, in a Ray job the job's.",
    )
    maker_cpus: float = Field(0, ge=0, description="Logical CPUs that Ray reserves for each maker.")
    maker_gpus: float = Field(0, ge=0, description="GPUs (or shares of one) reserved for each maker.")
    trainer_cpus: float = Field(0, ge=0, description="Logical CPUs that Ray reserves for each trainer.")
    trainer_gpus: float = Field(0, ge=0, description="GPUs reserved for each trainer.")
    object_store_bytes: int | None = Field(
        None, ge=80 * 1024**2, description="Shared memory of a local Ray; null leaves the size to Ray."
    )

    sync: Literal["full", "chunked", "adapter", "direct"] = Field(
        "full",
        description="What a weight sync sends, and how: all weights at once, all in chunks, or only what LoRA trains, "
        "through the object store; direct is all in chunks over a link of each maker with the trainers.",
    )
    weights: Literal["between-batches", "in-flight"] = Field(
        "between-batches",
        description="When a maker takes new weights: between-batches, when no answer and no episode of it is open (one "
        "version a sample, exact resume); in-flight, between two decoding steps, while it begins its next prompts.",
    )
    max_shard_bytes: int = Field(
        64 * 1024**2,
        ge=1024,
        description="With sync chunked or direct: most bytes in one chunk (a larger tensor is one chunk).",
    )
    start_timeout_seconds: float = Field(
        300.0, gt=0, le=86400, description="Longest wait for Ray, for a place for every actor, and for their models."
    )
    sync_timeout_seconds: float = Field(
        300.0, gt=0, le=86400, description="Longest wait for the makers to take one part of a new version."
    )
    episode_timeout_seconds: float = Field(
        3600.0, gt=0, le=604800, description="Longest wait for the samples of an episode, or for an evaluation."
    )
    lease_seconds: float = Field(
        900.0, gt=0, le=86400, description="Longest a maker may work on its prompts before it is held for stuck."
    )
    heartbeat_seconds: float = Field(
        60.0,
        ge=2,
        le=3600,
        description="Longest silence of a maker before it is started anew, or of a trainer before the run ends.",
    )
    max_restarts: int = Field(3, ge=0, le=1000, description="Times one maker is started anew before the run ends.")

    @model_validator(mode="after")
    def _in_flight_is_late(self) -> RayConfig:
        if self.weights == "in-flight" and self.max_staleness == 0:
            raise ValueError(
                "weights: in-flight makes samples of several policy versions, which max_staleness: 0 forbids; "
                "say max_staleness: 1, or weights: between-batches"
            )
        return self

    def check(self, run: ResolvedRun) -> Iterator[Problem]:
        yield from super().check(run)
        if self.sync == "adapter" and run.run.model.lora is None:
            problem = "adapter sends only what LoRA trains, but the model has no adapter"
            yield Problem("sync", problem, "add model.lora, or set transport.sync to full or chunked")

    def num_lanes(self, prompts_per_episode: int) -> int | None:
        """Batches that a maker makes at a time with weights in flight: its share of the episodes that may be open.

        None where it makes one after the other.
        """
        if self.weights != "in-flight":
            return None
        share = math.ceil(prompts_per_episode / self.num_makers)
        leases = math.ceil(share / (self.prompts_per_lease or share))
        return min(_MOST_LANES, (self.max_staleness + 1) * leases)

    def own_processes(self) -> OwnProcesses:
        return OwnProcesses(trainers=self.num_trainers, makers=self.num_makers, option="num_trainers")

    def staleness_bound(self) -> int:
        return self.max_staleness

    def updates_in_flight(self) -> bool:
        return self.weights == "in-flight"
