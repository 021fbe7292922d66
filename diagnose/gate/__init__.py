"""Two versions of a program to one of three verdicts: pass, regression, or cannot tell."""
