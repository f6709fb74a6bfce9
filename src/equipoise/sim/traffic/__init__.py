"""Traffic between nodes over a network of switches: who shares which cable, and what each gets."""
