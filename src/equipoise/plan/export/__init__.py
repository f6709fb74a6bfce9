"""A plan as the settings of another training program."""
