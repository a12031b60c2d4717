"""What starts the processes of a run on the machines of a cluster, one module for each."""
