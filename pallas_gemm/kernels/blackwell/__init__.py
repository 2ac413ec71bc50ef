"""The Blackwell kernel."""
