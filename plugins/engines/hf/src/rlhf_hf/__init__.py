"""The default rollout engine of the rlhf framework: generation with transformers."""
