"""Tasks of Reasoning Gym: its problems as prompts, its verifiers as a reward."""
