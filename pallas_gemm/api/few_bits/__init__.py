"""Records of weights of few bits."""
