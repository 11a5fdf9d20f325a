"""Conversations: found in a data set, rendered by a model's chat template, tied to characters."""
