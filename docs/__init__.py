"""Pages for users, and what writes those of the reference from the code."""
