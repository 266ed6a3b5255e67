"""Where prompts come from beyond one file of lines: datasets, mixtures, streams, curricula, problems made in code."""
