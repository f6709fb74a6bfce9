"""What tests run on ranks, which are other processes and import it by name."""
