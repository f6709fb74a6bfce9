"""Benches of one accelerator; ``python -m bench.gpu.run`` runs them all."""
