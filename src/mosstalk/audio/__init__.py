"""Sound as samples: reading, writing, resampling, loudness. No torch."""
