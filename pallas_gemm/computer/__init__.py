"""This computer: the driver of its GPUs, the user's folder, and which versions are installed."""
