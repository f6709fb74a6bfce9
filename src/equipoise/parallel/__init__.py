"""Floor 6: one file per axis. Single-device models in, models on a mesh out."""
