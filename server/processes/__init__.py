"""HTTP in processes of its own beside the engine's: what passes between them, and the two ends."""
