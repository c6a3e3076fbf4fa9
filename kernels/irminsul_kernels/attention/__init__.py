"""MLA attention over rows at any slot and position: the layout of a batch, and one file for each kernel."""
