"""Development tools for the kernels; no kernel imports them."""
