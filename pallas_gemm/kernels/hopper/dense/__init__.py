"""The path of one tile: its operands loaded, its sum, its result stored."""
