"""The configs that are considered, of which the heuristics choose."""
