"""dasc's controlled protocol as a few compiled programs: every arm starts from the same prefixes.

The suites whose problems are generated run so. A block of problems is prefilled once, up to where
the cached prefix ends; then each arm makes its own states out of the same checkpoints, KV and group
inputs (with the functions that serve), and all problems of the block go on at once. Plans and masks
are data, so that the number of programs does not grow with the number of arms.
"""
