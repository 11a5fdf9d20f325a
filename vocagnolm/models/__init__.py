"""Models: how they are loaded, adapted, sharded and probed, and what they cost."""
