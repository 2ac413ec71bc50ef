"""Instructions that Pallas has no words for."""
