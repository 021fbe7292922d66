"""How often the named cause is right: training scripts with a known fault, and what is said of them."""
