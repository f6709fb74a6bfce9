"""Context parallelism: attention over packed documents whose tokens lie on several ranks."""
