"""Images and sound: how even encoders are, and what they cost."""
