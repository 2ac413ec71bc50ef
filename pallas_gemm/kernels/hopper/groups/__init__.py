"""Products of groups whose sizes the running program has: of rows, or of what is contracted."""
