"""What tests of starts share."""
