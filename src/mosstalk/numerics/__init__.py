"""Number formats, random numbers and position tables that all of the code shares."""
