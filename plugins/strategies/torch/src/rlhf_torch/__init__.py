"""Training strategies of the rlhf framework that need nothing but PyTorch."""
