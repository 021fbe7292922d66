"""Spans to files to a Run: one writer, one reader, one format."""
