"""Options of the engine `hf`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, JsonValue

from rlhf_core import Column
from rlhf_core.config import Problem
from rlhf_core.errors import UserInputError
from rlhf_core.types import SamplingParams
from rlhf_forward import (
    SHAPING_COLUMNS,
    STRUCTURE,
    STRUCTURE_COLUMNS,
    ShapedEngineConfig,
    Structure,
    compile_structure,
    read_structure,
)

if TYPE_CHECKING:
    from rlhf_core.config import ResolvedRun


class HfEngineConfig(ShapedEngineConfig):
    """Rollouts with transformers."""

    removed: ClassVar[Mapping[str, str]] = {
        "compile": "decoding steps are never compiled: remove it",
        "prepack": "linear weights are always packed if that is faster: remove it",
        "cuda_graphs": "this engine does not capture CUDA graphs: remove it, or use the engine vllm",
    }

    max_batch_size: int = Field(64, ge=1, le=4096, description="Rows decoded at once (slots of the key-value cache).")
    max_cache_tokens: int = Field(
        131_072,
        ge=64,
        description="Maximum size of the key-value cache, in tokens over all slots. Fewer slots are used if the "
        "longest possible sequences would not fit.",
    )
    prefill_batch_tokens: int = Field(
        4096, ge=1, description="Maximum prompt tokens per forward pass, padding included. Bounds its memory."
    )
    prefix_cache_tokens: int = Field(
        32_768,
        ge=0,
        description="Maximum tokens of earlier turns whose keys and values are kept until an episode's next turn, in "
        "addition to max_cache_tokens. 0 recomputes them.",
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto",
        description="Arithmetic over float32 weights. auto: the same as the trainer's forward pass. fp32: full "
        "precision. bf16 and fp16 keep a copy of the linear weights while generating.",
    )
    structure: Annotated[dict[str, JsonValue], BeforeValidator(read_structure)] | None = Field(
        None,
        description="Form of every answer, from which other tokens are not sampled: {json_schema: {…}}, {regex: …}, "
        "{lark: …} (a grammar), or {file: PATH} that ends in .json, .regex or .lark.",
    )

    columns: ClassVar[Mapping[str, Column]] = {**SHAPING_COLUMNS, **STRUCTURE_COLUMNS}
    request_options: ClassVar[Mapping[str, str]] = {
        **ShapedEngineConfig.request_options,
        STRUCTURE: "instead of engine.structure. null: a free answer",
    }

    def check(self, run: ResolvedRun) -> Iterator[Problem]:
        """Yield problems of the options, and of a structure that is invalid for any tokenizer.

        Args:
            run: The resolved run.
        """
        yield from super().check(run)
        if STRUCTURE in self.options:
            yield Problem(f"options.{STRUCTURE}", "is an option of the section", f"set engine.{STRUCTURE}")
        structure = Structure.of(self.structure, where=f"engine.{STRUCTURE}")
        if structure is not None:
            try:
                compile_structure(structure, where=f"engine.{STRUCTURE}")
            except UserInputError as error:
                yield Problem(STRUCTURE, error.message, error.hint)

    def sampling(self) -> SamplingParams:
        """Return the sampling parameters of the run's rollouts, with the structure as a request option."""
        sampling = super().sampling()
        own: dict[str, Any] = {} if self.structure is None else {STRUCTURE: self.structure}
        return replace(sampling, options={**own, **sampling.options})
