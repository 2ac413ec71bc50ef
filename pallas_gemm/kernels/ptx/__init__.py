"""What Pallas has no words for: PTX and Mosaic in a kernel, each beside what it means simulated."""
