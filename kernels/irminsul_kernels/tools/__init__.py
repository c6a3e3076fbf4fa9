"""Tools for those who write kernels; nothing at run time imports them."""
