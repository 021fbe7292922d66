"""The nouns. Standard library only."""
