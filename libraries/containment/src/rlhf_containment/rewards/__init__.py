"""The callers of rewards: `isolate`, which the option of that name turns on, and `lock-watch`."""
