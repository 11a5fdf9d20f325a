"""Conversations: found in a dataset, rendered with a chat template, mapped to characters."""
