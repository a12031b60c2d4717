"""Runs on a Slurm cluster: one batch job, in which each process of the run is a job step."""
