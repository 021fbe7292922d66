"""Runs the user's script: wires hooks and store together."""
