"""Training of the shipped model and its tokenizer; nothing here is needed to serve."""
