"""What reuse does to answers: `irminsul eval`. Runs the engine in this process; no server, no Triton."""
