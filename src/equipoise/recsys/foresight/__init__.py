"""What a recommender will do before it runs: seconds of its steps, and how even its ranks are."""
