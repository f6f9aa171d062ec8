"""Smaller caches for trained checkpoints: which layers share keys or values, and weights refitted to it.

calibration runs the source on text, a layer at a time; refit and keys are the least squares and the attention fits of
one reader; search chooses the plan; shrink does it all and writes the result; accounting measures what it costs.
"""
