"""Names of files that several rooms look for."""

RESOLVED = "resolved.json"
"""The resolved run, in a run's folder."""

TOKENIZER_FILE = "tokenizer.json"
"""A tokenizer, in a model's folder."""

HF = "hf"
"""What a run keeps of the model that it began from, in a run's folder."""

CHECKPOINTS = "checkpoint"
"""A run's checkpoints, in its folder."""

RECOMMEND = "recommend.json"
"""The record of a recommender's run, in its folder."""
