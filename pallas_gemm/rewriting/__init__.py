"""Rewriting traced programs of others: their products become ours."""
