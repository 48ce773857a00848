"""Wrong input for everything that reads input: one generator and one judge for each kind, see experiments.fuzz."""
