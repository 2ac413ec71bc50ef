"""XLA in the place of a kernel: how it computes a product, how long, and where it is faster."""
