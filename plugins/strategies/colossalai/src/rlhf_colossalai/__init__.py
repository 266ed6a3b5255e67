"""Training strategies of the rlhf framework on ColossalAI boosters."""
