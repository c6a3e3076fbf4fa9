"""Reading a Hugging Face model folder: JSON files, config fields, tokenizer and template files, safetensors."""
