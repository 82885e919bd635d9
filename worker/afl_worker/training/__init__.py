"""What a worker computes on its own data: losses, gradients, metrics; and how long that takes."""
