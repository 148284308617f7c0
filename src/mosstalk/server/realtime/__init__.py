"""The OpenAI Realtime protocol: what clients send to commands, what a session tells to events.

Pure: no sockets, no models. ``protocol.RealtimeProtocol`` is the way in; one serves one connection.
"""
