"""The command `vocagnolm demo`: the embedded world, the methods, their runs and the directory."""
