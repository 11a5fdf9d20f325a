"""Few-shot evaluation on the nine benchmarks of the paper, verdict for verdict as published."""
