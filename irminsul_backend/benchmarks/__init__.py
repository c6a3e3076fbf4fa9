"""Timings: `python -m irminsul_backend.benchmarks` as ratios taken in one run; `.gpu_engine`: the engine on a GPU."""
