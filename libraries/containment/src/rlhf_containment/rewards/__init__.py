"""The reward callers `isolate`, which the option of that name enables, and `lock-watch`."""
