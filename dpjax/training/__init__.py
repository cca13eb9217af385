"""From batches to a trained model: losses, optimiser, steps, checkpoints, the loop."""
