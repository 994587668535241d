"""What is learned: the frozen target, the drafter, its objective, decoding and export."""
