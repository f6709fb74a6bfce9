"""Serving simulated: the engine's own scheduler, run over a trace with predicted seconds."""
