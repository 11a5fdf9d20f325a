"""Models before and after loading: where they come from, what is refused, adapters, attention."""
