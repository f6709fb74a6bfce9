"""Plans whose layers each pick their own strategy."""
