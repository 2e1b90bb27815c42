"""SMP and its ablations."""
