"""The border to Triton: tensors in and out, the logic of the five models, and the launcher of the server.

Only the commands and the benchmarks import this package. `server` runs in the user's process. `tensors`, `events` and
`engine_interface` are plain Python. `build`, `steps`, `endpoints` and `metrics` run inside the Python backend's stub
processes: they import `triton_python_backend_utils`, which exists only there and which `typings/` describes to mypy.
"""
