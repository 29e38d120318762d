"""What memory a training step takes, measured and estimated."""
