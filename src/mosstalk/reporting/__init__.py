"""Tables, pages and sentences for all that is measured and printed."""
