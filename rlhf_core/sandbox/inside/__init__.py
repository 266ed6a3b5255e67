"""The half of the sandbox that runs in the child: it shuts itself in, then starts the program.

Started without site-packages from a folder of its own, so it imports the standard library and its siblings only.
"""
