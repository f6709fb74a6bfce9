"""A recommender over HTTP: requests that come together are scored together."""
