"""Tiles that several workers share along k: their sums are joined, or handed on."""
