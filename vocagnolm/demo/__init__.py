"""The command `vocagnolm demo`: its world, methods, runs and directory."""
