"""What serves the shell, files, processes and packages, and knows nothing of the method."""
