"""The prompt sources that come with core: `jsonl`, `hf-dataset`, `sort-digits`."""
