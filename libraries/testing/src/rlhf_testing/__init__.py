"""Fakes and contract suites for testing plugins.

- `models`: a causal LM and a tokenizer in milliseconds, and `save_tiny_model` for `model.path`.
- `engine`: `FakeEngine`, deterministic answers without a model.
- `episodes`: episodes of an environment, played without a model.
- `samples`: prompts, items and groups with predictable numbers.
- `runs`: `tiny_run`, a run file of a run that takes well under a second.
- `contracts`, `strategy_suite`: tests that every plugin of a kind must pass.
"""
