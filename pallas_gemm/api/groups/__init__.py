"""Products of groups of rows, and sums over groups."""
