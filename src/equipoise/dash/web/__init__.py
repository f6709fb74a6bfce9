"""The live dashboard: a local web page over run folders and a server's metrics."""
