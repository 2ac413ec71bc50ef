"""PTX and Mosaic in kernels, where Pallas has no operation, each beside its simulated meaning."""
