"""Whether a run is healthy: who is slow, whose numbers went bad, whose bytes have changed."""
