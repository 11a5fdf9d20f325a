"""From an output to a verdict, by processes that can be killed."""

from vocagnolm.io import check_extra

# Before any import of them: with another antlr4 verdicts would differ silently.
check_extra("eval")
