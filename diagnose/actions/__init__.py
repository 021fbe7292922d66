"""Fixes for a running job, one file each, undone on leaving."""
