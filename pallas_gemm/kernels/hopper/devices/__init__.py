"""Several devices that work on one product: rows that are gathered or scattered."""
