"""The run file: its sections, reading and resolving it, and the problems it can have."""
