"""Console commands, launch scripts and benchmarks: thin, on top of everything else."""
