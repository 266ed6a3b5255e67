"""Options of rules that need validation beyond types, or an optional library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from rlhf_core.config import Section


class RegexConfig(Section):
    """Options of `regex`."""

    pattern: str = Field(min_length=1, description="Python regular expression, with flags as in (?is).")
    mode: Literal["search", "fullmatch"] = Field("search", description="Match anywhere, or the whole completion.")

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        from .matching import Matcher

        Matcher(pattern)
        return pattern


class MathEquivalenceConfig(Section):
    """Options of `math-equivalence`."""

    decimal_places: int = Field(
        6, ge=0, le=15, description="Decimal places to which floating-point numbers must agree."
    )
    require_boxed: bool = Field(False, description="Accept only a result in \\boxed{…}.")


class JsonSchemaConfig(Section):
    """Options of `json-schema`."""

    inline_schema: dict[str, Any] | None = Field(None, description="The JSON schema itself.")
    schema_file: str | None = Field(None, description="A file that contains the schema.")
    metadata_key: str | None = Field(None, description="Metadata key of a sample's own schema.")
    allow_fence: bool = Field(False, description="Read the JSON from a fenced code block if there is one.")
    valid_json_score: float = Field(0.0, ge=0, le=1, description="Score of JSON that does not match the schema.")

    @model_validator(mode="after")
    def _one_schema(self) -> JsonSchemaConfig:
        if self.inline_schema is not None and self.schema_file is not None:
            raise ValueError("set inline_schema or schema_file, not both")
        if self.schema_file is not None and not Path(self.schema_file).expanduser().is_file():
            raise ValueError(f"no such file: {self.schema_file}")
        try:
            from .schema_check import make_validator
        except ImportError:  # jsonschema is missing, which is reported elsewhere
            return self
        schema = self.read_schema()
        if schema is not None:
            make_validator(schema)
        return self

    def read_schema(self) -> Any:
        """Return the schema or the content of its file, None if neither is set. Raises `ValueError` if not JSON."""
        if self.schema_file is None:
            return self.inline_schema
        try:
            return json.loads(Path(self.schema_file).expanduser().read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self.schema_file} is not JSON: {error}") from None


class CodeExecutionConfig(Section):
    """Options of `code-execution`."""

    allow_execution: bool = Field(False, description="Must be true: this runs programs that a model wrote.")
    timeout_seconds_per_test: float = Field(5.0, gt=0, description="Wall-clock limit of one program run.")
    cpu_seconds: int = Field(5, ge=1, description="Limit on processor time of one program run, over all its processes.")
    memory_bytes: int = Field(
        512 * 2**20, ge=2**26, description="Limit on address space per process, and on memory of all its processes."
    )
    max_processes: int = Field(16, ge=1, description="Maximum number of processes and threads.")
    max_output_bytes: int = Field(2**20, ge=1, description="Maximum output. A program that writes more is killed.")
    max_file_bytes: int = Field(2**24, ge=0, description="Maximum size of a file that the program writes.")
    max_folder_bytes: int = Field(2**26, ge=4096, description="Maximum size of its in-memory folder.")
    max_files: int = Field(1024, ge=1, description="Maximum number of files and folders in its folder.")
    sandbox: Literal["namespaces", "landlock"] = Field(
        "namespaces", description="Isolation of programs. landlock is weaker, for machines that forbid namespaces."
    )
    partial_credit: bool = Field(False, description="Score the share of passed tests instead of all or nothing.")
    tests_key: str = Field("tests", min_length=1, description="Metadata key of a sample's tests.")

    @model_validator(mode="after")
    def _allowed(self) -> CodeExecutionConfig:
        if not self.allow_execution:
            raise ValueError(
                "code-execution runs programs that a model wrote: set allow_execution: true to confirm this"
            )
        return self
