"""What is done before and after the engine, without Triton: requests become chunked prompts, events become replies."""
