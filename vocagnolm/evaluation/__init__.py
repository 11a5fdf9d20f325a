"""Accuracy on math benchmarks, verdict for verdict as the published harness measures it.

To read in this order: `evaluate` (the command), `evaluating` (load, ask, grade, report), `tasks`
(questions and prompts), `runner` and `records` (all outputs, once), `engines` (prompts to
completions), `extraction` and `grading` (outputs to verdicts), `accuracy` and `results` (verdicts
to numbers). `regrading` grades stored outputs.
"""
