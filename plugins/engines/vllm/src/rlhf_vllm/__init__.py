"""A rollout engine of the rlhf framework: generation with vLLM."""
