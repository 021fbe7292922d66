"""Which action next, and whether it helped."""
