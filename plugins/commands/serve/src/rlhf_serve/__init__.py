"""An OpenAI-compatible server: `rlhf serve`, and the policy for agents that drive themselves."""
