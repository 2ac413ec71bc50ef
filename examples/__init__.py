"""Programs that show the multiply in use."""
