"""Cross-layer sharing for trained checkpoints: a smaller cache, refitted in closed form, and what it costs."""
