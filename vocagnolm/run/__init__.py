"""One training job: from the command line to a finished directory."""
