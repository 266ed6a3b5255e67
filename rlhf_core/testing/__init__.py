"""Fakes and contract suites: what a plugin author runs against their own plugin.

- `models`: a causal LM and a tokenizer in milliseconds; `save_tiny_model` for `model.path`.
- `engine`: `FakeEngine`, deterministic answers without a model.
- `episodes`: episodes of an environment, played without a model.
- `samples`: prompts, items and groups with numbers that a test can predict.
- `runs`: `tiny_run`, a run file whose run takes well under a second.
- `contracts`, `strategy_suite`: what every plugin of a kind must do.
"""
