"""A Run to a Profile: pure functions."""
