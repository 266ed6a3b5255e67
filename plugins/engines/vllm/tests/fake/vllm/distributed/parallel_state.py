"""What vLLM's workers share."""


def cleanup_dist_env_and_memory():
    pass
