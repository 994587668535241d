"""What runs: configuration, the window of futures, the training loop, checkpoints, the run folder."""
