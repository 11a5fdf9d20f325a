"""Reports on finished runs and on tokenizers: audits, comparisons, the paper's figures."""
