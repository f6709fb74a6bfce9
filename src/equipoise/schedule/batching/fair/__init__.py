"""Who is next: policies of fairness behind one protocol."""
