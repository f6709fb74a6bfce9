"""OpenAI's API over HTTP: bodies in, text and events out, tenants, limits and metrics."""
