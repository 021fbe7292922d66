"""Faults that only this team's scripts have."""
