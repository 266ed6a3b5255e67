"""Processes that can be killed: started, watched, asked and ended in one way, whatever runs in them."""
