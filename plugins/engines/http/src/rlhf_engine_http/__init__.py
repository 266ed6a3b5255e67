"""A rollout engine of the rlhf framework: generation by a vLLM or SGLang server."""
