"""What it means: plots, the verdict on a run, the doctor."""
