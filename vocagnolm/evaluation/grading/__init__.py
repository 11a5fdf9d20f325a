"""From an output to a verdict, in processes that can be killed."""
