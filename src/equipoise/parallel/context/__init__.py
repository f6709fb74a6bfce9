"""Context parallelism: attention over packed documents whose tokens are spread over ranks."""
