"""Which kernel computes a product, with which config and order, and why."""
