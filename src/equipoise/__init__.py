"""equipoise: train and serve large models so that every device finishes at the same time."""

__version__ = "0.1.0"
