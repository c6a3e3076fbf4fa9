"""Preprocessing and postprocessing, without Triton: from requests to chunked prompts, and from events to replies."""
