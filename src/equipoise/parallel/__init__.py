"""One room per axis. Single-device models in, models on a mesh out."""
