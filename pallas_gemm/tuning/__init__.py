"""Finds the fastest config of a product by running it."""
