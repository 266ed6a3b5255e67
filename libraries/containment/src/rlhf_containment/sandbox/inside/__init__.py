"""The child's half of the sandbox, which isolates itself and then starts the program.

It is started from its own folder without site-packages, so it imports only the standard library and its siblings.
"""
