"""Dense parts of recommenders, on top of pooled tables: a file and a function for each."""
