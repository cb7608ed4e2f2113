"""One module per HTTP service: its route table and its handlers, nothing else."""
