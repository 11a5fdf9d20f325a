"""Grade answers verdict for verdict as the harness, in processes that can be killed."""
