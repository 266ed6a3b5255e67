"""The rules with validated options or optional libraries.

The entry points of the others (`exact-match`, `length`, …) name their functions directly.
"""

from __future__ import annotations

from rlhf_core.components import Component

from .config import CodeExecutionConfig, JsonSchemaConfig, MathEquivalenceConfig, RegexConfig

regex = Component(
    summary="1 if a regular expression matches the completion, else 0.",
    config=RegexConfig,
    build="rlhf_reward_rules.regex:build",
)
math_equivalence = Component(
    summary="1 if the result equals the answer mathematically, else 0 (math-verify).",
    config=MathEquivalenceConfig,
    build="rlhf_reward_rules.math_equivalence:build",
    requires=("math_verify",),
    install="pip install 'rlhf-reward-rules[math]'",
    isolate=True,
)
json_schema = Component(
    summary="1 if the completion is JSON that matches a schema, else 0.",
    config=JsonSchemaConfig,
    build="rlhf_reward_rules.json_schema:build",
    requires=("jsonschema",),
    install="pip install 'rlhf-reward-rules[json]'",
    isolate=True,
)
code_execution = Component(
    summary="1 if the program in the completion passes the sample's tests in a sandbox, else 0. Disabled by default.",
    config=CodeExecutionConfig,
    build="rlhf_reward_rules.code_execution:build",
)
