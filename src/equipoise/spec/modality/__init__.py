"""Images and sound: sections of run.toml, sizes of encoders, items within documents."""
