"""An OpenAI-compatible server for `rlhf serve` and for agents that call the policy themselves."""
