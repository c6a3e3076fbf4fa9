"""Everything that is not attention: rotation, norms and new rows, SiLU gate, sampling."""
