"""Whether a kernel works on this computer's GPU, found by running it in order of growing trust."""
