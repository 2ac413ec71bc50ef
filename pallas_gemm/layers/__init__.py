"""Code that the layers of all libraries share, and no library in it."""
