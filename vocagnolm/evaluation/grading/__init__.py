"""From an output to a verdict, by processes that can be killed."""
