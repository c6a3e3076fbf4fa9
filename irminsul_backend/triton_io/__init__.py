"""The border to Triton: tensors in and out, the logic of the five models, and the launcher of the server.

Nothing else in the package imports this. `launcher` runs in the user's process, `tensors`, `events`, `transcript` and
`metrics` are plain Python, `models` and `entrances` run inside the Python backend's stub processes.
"""
