"""A Hugging Face model folder: its JSON files, its tokenizer's files, the headers and tensors of its weights."""
