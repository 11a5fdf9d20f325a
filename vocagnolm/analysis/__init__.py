"""What is read off finished runs and tokenizers: audits, comparisons, the paper's figures."""
