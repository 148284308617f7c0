"""Below engine and codec: devices, CUDA graphs, pinned host buffers, timing, the deadline lock."""
