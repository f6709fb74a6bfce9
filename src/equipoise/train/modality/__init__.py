"""Images and sound in a run: encoded before the decoder's micro-batches, measured, written down."""
