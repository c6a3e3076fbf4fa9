"""Runs against real servers that are too long for `make test`, and the traffic they send."""
