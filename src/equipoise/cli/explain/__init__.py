"""``equipoise explain``: attention, pipelines, redistribution and plans, each with its table."""
