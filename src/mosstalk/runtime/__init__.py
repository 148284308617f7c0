"""What fast paths stand on: devices, graphs, host buffers, clocks, and the lock by deadline."""
