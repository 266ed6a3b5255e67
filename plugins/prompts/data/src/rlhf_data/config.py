"""Options of `sort-digits`."""

from __future__ import annotations

from pydantic import Field, model_validator

from rlhf_core.config import PromptsConfig


class SortDigitsConfig(PromptsConfig):
    """Problems like `31415926>`, whose answer is the digits in ascending order."""

    num_digits: int = Field(8, ge=1, le=64, description="Digits of each problem.")
    size: int = Field(100_000, ge=1, description="How many different problems.")
    problem_seed: int = Field(0, ge=0, description="Which problems; independent of the run's seed, as a file would be.")

    @model_validator(mode="after")
    def _enough_numbers(self) -> SortDigitsConfig:
        if self.size > 10**self.num_digits:
            raise ValueError(
                f"size {self.size}: there are only {10**self.num_digits} numbers of {self.num_digits} digits"
            )
        return self
