"""Starting a run: on this machine, by Slurm, on Kubernetes."""
