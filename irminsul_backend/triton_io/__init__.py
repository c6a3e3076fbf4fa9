"""The border to Triton: tensors in and out, the logic of the models, and the launcher of the server.

Only the commands and the benchmarks import this package. `server` runs in the user's process. `tensors`, `events`,
`sealing` and `engine_interface` are plain Python. `build`, `steps`, `engine_model`, `endpoints` and `metrics` run in
the Python backend's stub processes: they import `triton_python_backend_utils`, which exists only there and which
`typings/` describes to mypy.
"""
