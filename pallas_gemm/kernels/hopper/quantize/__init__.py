"""A matrix quantized in blocks, in one read."""
