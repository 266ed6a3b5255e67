"""The child's half of the sandbox: it isolates itself, then starts the program.

Started without site-packages from its own folder, so it imports only the standard library and its siblings.
"""
