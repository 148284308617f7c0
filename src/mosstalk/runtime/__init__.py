"""What every fast path stands on: devices, graphs, host buffers, clocks and the lock by deadline."""
