"""PPO for the rlhf framework: the algorithm, its value model and the seed's trainer class."""
