"""Which replicas serve a trace of requests best: a search that runs the engine's scheduler."""
