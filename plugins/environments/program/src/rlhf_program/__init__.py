"""Programs as agents: each episode runs one in a sandbox, and its calls of the policy are the turns."""
