"""What the text of the script says: what a line is for, and what values flow where."""
