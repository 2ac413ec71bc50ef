"""Programs that measure and show; not shipped in the wheel."""
