"""Critic-free algorithms for the rlhf framework: GRPO and its family, RLOO, REINFORCE++."""
