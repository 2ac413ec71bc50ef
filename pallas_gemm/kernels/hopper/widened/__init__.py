"""Products with weights of few bits, which are widened on their way to the tensor cores."""
