"""The kernels: one file per architecture, and the small parts that they share."""
