"""What goes together: cuts, plans, mixing, cost. Numpy only."""
