"""Tables whose rows lie in few bits or in a file, behind a cache of fp32 rows."""
