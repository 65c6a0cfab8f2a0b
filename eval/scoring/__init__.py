"""Scores of one prediction, from 0 to 1, as each benchmark defines them."""
