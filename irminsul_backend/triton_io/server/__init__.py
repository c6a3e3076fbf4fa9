"""The tritonserver process: finding it, starting it, watching it, ending it without a trace."""
