"""Fakes and contract suites for plugin authors to test their own plugins.

- `models`: a causal LM and a tokenizer in milliseconds; `save_tiny_model` for `model.path`.
- `engine`: `FakeEngine`, deterministic answers without a model.
- `episodes`: episodes of an environment, played without a model.
- `samples`: prompts, items and groups with numbers that a test can predict.
- `runs`: `tiny_run`, a run file whose run takes well under a second.
- `contracts`, `strategy_suite`: requirements on every plugin of a kind.
"""
