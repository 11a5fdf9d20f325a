"""What a trainer is made of: options, models, documents, checkpoints, log. It sees no argv."""
