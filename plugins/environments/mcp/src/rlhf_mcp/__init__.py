"""Tools of an MCP server as an environment."""
