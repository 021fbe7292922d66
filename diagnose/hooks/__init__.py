"""Script to spans: one file per thing measured."""
