"""Options of the transport `ray`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, JsonValue, field_validator, model_validator

from rlhf_core.config import OwnProcesses, Problem, ResolvedRun, TransportConfig

if TYPE_CHECKING:
    from rlhf_core.wiring import RunInputs

_MAX_BATCHES = 32
"""Each batch has a thread, and with an isolated environment a process."""


class RayConfig(TransportConfig):
    """Number and placement of actors, transfer of weights to the makers, and all deadlines."""

    removed: ClassVar[Mapping[str, str]] = {
        "placement": "trainers that reserve CPUs or GPUs are placed close together, so remove it",
        **dict.fromkeys(
            ("canary_prompts", "log_prob_gap_bound"),
            "guards.log_prob_gap watches rollout/logprob_gap_max with every transport, so remove it",
        ),
    }

    num_makers: int = Field(1, ge=1, le=1024, description="Actors that generate and score answers.")
    num_trainers: int = Field(1, ge=1, le=1024, description="Actors that train, as one process group.")
    max_staleness: int = Field(
        1,
        ge=0,
        le=64,
        description="Maximum number of policy versions between a sample and its trainer. 0 is strictly on-policy.",
    )
    prompts_per_lease: int | None = Field(
        None, ge=1, description="Prompts a maker takes at a time. null splits an episode evenly among the makers."
    )

    address: str | None = Field(
        None,
        min_length=1,
        description="Running Ray cluster (`auto`, host:port, ray://…). null: the Ray job's cluster, else a local Ray.",
    )
    runtime_env: dict[str, JsonValue] | None = Field(
        None,
        description="Ray's runtime environment of all actors: env_vars, working_dir, pip, … A variable whose value is "
        "null is copied from the environment of this command, so that a secret is not part of the run file.",
    )
    maker_cpus: float = Field(0, ge=0, description="Logical CPUs that Ray reserves for each maker.")
    maker_gpus: float = Field(0, ge=0, description="GPUs (or shares of one) reserved for each maker.")
    trainer_cpus: float = Field(0, ge=0, description="Logical CPUs that Ray reserves for each trainer.")
    trainer_gpus: float = Field(0, ge=0, description="GPUs reserved for each trainer.")
    object_store_bytes: int | None = Field(
        None, ge=80 * 1024**2, description="Shared memory of a local Ray. null uses Ray's default."
    )

    sync: Literal["full", "chunked", "adapter", "direct"] = Field(
        "full",
        description="Content and path of a weight sync. Through the object store: full (all weights at once), chunked "
        "(all, in chunks) or adapter (only LoRA weights). direct: all, in chunks, over links along a tree of makers.",
    )
    weights: Literal["between-batches", "in-flight"] = Field(
        "between-batches",
        description="When a maker takes new weights: between-batches (all its answers and episodes are finished, so a "
        "sample has one version and a resume is exact) or in-flight (between decoding steps, while new prompts start).",
    )
    max_shard_bytes: int = Field(
        64 * 1024**2,
        ge=1024,
        description="Maximum bytes of a chunk with sync chunked or direct. A larger tensor is one chunk.",
    )
    start_timeout_seconds: float = Field(
        300.0, gt=0, le=86400, description="Maximum wait for Ray, for the resources of every actor, and for the models."
    )
    sync_timeout_seconds: float = Field(
        300.0, gt=0, le=86400, description="Maximum wait for the makers to take one part of a new version."
    )
    episode_timeout_seconds: float = Field(
        3600.0, gt=0, le=604800, description="Maximum wait for the samples of an episode, or for an evaluation."
    )
    lease_seconds: float = Field(
        900.0, gt=0, le=86400, description="Maximum time a maker may work on its prompts before it is presumed stuck."
    )
    heartbeat_seconds: float = Field(
        60.0,
        ge=2,
        le=3600,
        description="Maximum silence of a maker before it is restarted, or of a trainer before it counts as lost.",
    )
    max_restarts: int = Field(3, ge=0, le=1000, description="Maximum restarts of one maker before the run ends.")
    trainer_restarts: int = Field(
        0,
        ge=0,
        le=1000,
        description="How often the run may continue from its newest checkpoint by itself after the process or node of "
        "a trainer or of the coordinator was lost. An error that a trainer raises always ends the run.",
    )

    @field_validator("runtime_env")
    @classmethod
    def _check_variables(cls, value: dict[str, JsonValue] | None) -> dict[str, JsonValue] | None:
        variables = (value or {}).get("env_vars")
        if variables is None:
            return value
        if not isinstance(variables, dict):
            raise ValueError("env_vars must be a mapping from names to values")
        wrong = [name for name, each in variables.items() if isinstance(each, bool | float | list | dict)]
        if wrong:
            raise ValueError(f"env_vars: the values of {', '.join(wrong)} must be text. Write them in quotes")
        # Ray accepts only text.
        texts: dict[str, JsonValue] = {name: str(e) if isinstance(e, int) else e for name, e in variables.items()}
        return {**(value or {}), "env_vars": texts}

    @model_validator(mode="after")
    def _check_in_flight(self) -> RayConfig:
        if self.weights == "in-flight" and self.max_staleness == 0:
            raise ValueError(
                "weights: in-flight mixes policy versions in a sample, which max_staleness: 0 forbids. "
                "Set max_staleness: 1, or weights: between-batches"
            )
        return self

    def check(self, run: ResolvedRun) -> Iterator[Problem]:
        """Yield combinations of this configuration and the rest of the run that cannot work."""
        yield from super().check(run)
        if self.sync == "adapter" and run.run.model.lora is None:
            problem = "adapter sends only what LoRA trains, but the model has no adapter"
            yield Problem("sync", problem, "add model.lora, or set transport.sync to full or chunked")

    def check_inputs(self, inputs: RunInputs) -> None:
        """Raise `UserInputError` for a runtime environment that Ray would reject. Called in the driver only."""
        from .runtime_env import init_options  # on use, since files of options import core only

        init_options(self.runtime_env)

    def max_batches(self, prompts_per_episode: int) -> int | None:
        """Number of batches that a maker generates concurrently: its share of the episodes that may be open.

        Args:
            prompts_per_episode: `train.prompts_per_episode` of the run.

        Returns:
            The number of batches with `weights: in-flight`, else None: one batch at a time.

        Example:
            >>> RayConfig(num_makers=2, weights="in-flight").max_batches(64)
            2
            >>> RayConfig(num_makers=2, weights="in-flight", prompts_per_lease=8).max_batches(64)
            8
        """
        if self.weights != "in-flight":
            return None
        share = math.ceil(prompts_per_episode / self.num_makers)
        leases = math.ceil(share / (self.prompts_per_lease or share))
        return min(_MAX_BATCHES, (self.max_staleness + 1) * leases)

    def own_processes(self) -> OwnProcesses:
        return OwnProcesses(trainers=self.num_trainers, makers=self.num_makers, option="num_trainers")

    def staleness_bound(self) -> int:
        return self.max_staleness

    def updates_in_flight(self) -> bool:
        return self.weights == "in-flight"
