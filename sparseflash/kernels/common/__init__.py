"""What the portable and the Hopper kernels share: launches, softmax, dropout, device facts."""
