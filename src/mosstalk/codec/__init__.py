"""Speech to codes and codes to speech: MOSS-Speech's own streaming codec."""
