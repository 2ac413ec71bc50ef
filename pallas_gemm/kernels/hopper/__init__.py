"""The Hopper kernel."""
