"""The server: one process for sockets, one for engine and codec, and a link between them."""
