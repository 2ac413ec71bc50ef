"""The functions that a program calls."""
