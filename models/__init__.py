"""What is studied: the addition task and the transformers that learn it."""
