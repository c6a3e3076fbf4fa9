"""Timings, as ratios taken side by side in one run: `python -m irminsul_backend.benchmarks`."""
