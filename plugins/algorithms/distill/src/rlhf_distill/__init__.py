"""On-policy distillation for the rlhf framework."""
