"""What agents send: recorded traces, scenarios that disturb them, made-up sessions, worlds of facts, and replay."""

__version__ = "0.1.0"
