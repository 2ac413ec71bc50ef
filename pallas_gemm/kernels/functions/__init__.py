"""Functions as epilogues: how they are read, divided between kernel and XLA, and made shorter."""
