"""The parts of a trainer: options, models, documents, checkpoints, log. They see no argv."""
