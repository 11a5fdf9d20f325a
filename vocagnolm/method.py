"""The settings of a method. A command line is checked before torch is imported."""

import importlib
import math
import os
import sys
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Literal, get_args

from vocagnolm.fields import Names, OptionError, check_options, named, option

Aggregation = Literal["max", "mean", "sum", "share"]
Unmapped = Literal["include", "exclude", "mean"]
Selection = Literal["top_k", "accept", "dft", "stm", "eaft"]
Scope = Literal["sequence", "batch"]
Reduction = Literal["min", "mean", "max", "weighted", "first"]
# These selections weight a token by the student's own distribution, without a teacher.
_WITHOUT_TEACHER = ("dft", "stm", "eaft")
# The first two are KL(p_S || p_T), Eq. (5), and KL(p_T || p_S), over the tokens that both models
# share. The third is the L1 distance of the sorted probabilities, ULD's Wasserstein distance, Eq.
# (6), which needs no common vocabulary.
Distance = Literal["reverse_kl", "forward_kl", "sorted_l1"]

# top_k is counted in millionths, because integers round alike on a host and on any device.
UNITS = 10**6

# Settings that a method reads in addition to those for choosing tokens.
_READ_BY: dict[str, set[str]] = {
    "cpt": set(),
    "random": set(),
    "kld": {"kld_direction"},
    "uld": {"uld_weight", "uld_pairing"},
    "rho1": {"rho1_score"},
    "chunk": {"aggregation", "chunks", "chunk_guidance", "chunk_selection"},
}
_CHOICE_SETTINGS = "top_k top_k_warmup_steps unselected_weight selection_scope loss_divisor".split()


# -- What users write themselves -----------------------------------------------------------------


METHODS = Names("vocagnolm cpt random kld uld rho1 chunk package.module:Class".split())
AGGREGATIONS = Names([*get_args(Aggregation), "package.module:function"])


def load_own(option: str, name: str) -> Any:
    """Import a user's class or function, which an option names as `package.module:name`.

    Modules of the working directory come first.

    Raises:
        OptionError: it cannot be imported.
    """
    # The path of an installed command begins with its own directory, not with this one.
    directory = os.getcwd()
    if directory not in sys.path:
        sys.path.insert(0, directory)
    module, _, attribute = name.partition(":")
    try:
        return attrgetter(attribute)(importlib.import_module(module))
    # A user's module can raise anything when it is imported.
    except Exception as error:
        raise OptionError(
            option,
            f"{name} cannot be loaded ({type(error).__name__}: {error}): expected "
            "package.module:name, defined at the top level of a module of the working directory "
            "or of an installed package",
        ) from error


def name_own(option: str, value: Any) -> str:
    """Return the name by which `load_own` finds a class or function.

    Raises:
        OptionError: no name leads to it.
    """
    # The settings of a run have only the name. It must find the same object again when the run
    # resumes, which is impossible for a lambda or a nested function.
    name = f"{getattr(value, '__module__', None)}:{getattr(value, '__qualname__', value)}"
    if load_own(option, name) is not value:
        raise OptionError(option, f"{name} does not import as the object that was given")
    return name


# -- Settings ------------------------------------------------------------------------------------


@dataclass
class Method:
    """All settings of a method: one record for parser, trainer, views and stores.

    They are named like the options of `vocagnolm train`, whose help texts describe them. The
    defaults are the paper's.

    Your own class or function is given as an object or by its name `package.module:name`
    (docs/library.md). The settings keep the name.

    Raises:
        ValueError: a value is out of range.
    """

    method: str = option(
        "vocagnolm",
        "cpt: plain continual pretraining; random: a random top_k; kld, uld, rho1, chunk: the "
        "paper's baselines; or your own class.",
        first=True,
        choices=METHODS,
    )
    top_k: float = option(
        0.4, "Share of the tokens to train on (Eq. 4).", interval="(0, 1]", first=True
    )
    aggregation: str = option(
        "max",
        "How to combine the losses of the teacher tokens that cover a student token (Eq. 2). "
        "share (beyond the paper): in proportion to their characters; or your own function.",
        first=True,
        choices=AGGREGATIONS,
    )
    unmapped: Unmapped = option(
        "include", "What to do with tokens that no teacher token covers (Section 6.2).", first=True
    )
    # The paper does not say. A share of each sequence does not depend on the batch.
    selection_scope: Scope = option(
        "sequence", "Take the top_k of each sequence, or of the micro-batch."
    )
    loss_divisor: Literal["all", "selected"] = option(
        "all",
        "Divide the loss by the number of label tokens (Eq. 3), or by the sum of the weights.",
    )
    selection: Selection = option(
        "top_k",
        "top_k: Eq. 4. accept (beyond the paper): weight tokens by min(1, p_teacher / p_student). "
        "Without a teacher: dft, by p_student; stm, only likely tokens; eaft, by the entropy.",
        first=True,
    )
    # Not a number, because the records of earlier runs lack it, and these runs may resume.
    stm_perplexity: float | None = option(
        None,
        "Largest perplexity 1 / p_student of a token that --selection stm trains on. Default: 2.5.",
        interval="(1, inf)",
    )
    unselected_weight: float = option(
        0.0,
        "Weight of tokens that are not selected (beyond the paper). 0: Eq. 4.",
        interval="[0, 1)",
    )
    kld_direction: Literal["reverse", "forward"] = option(
        "reverse", "reverse: KL(student || teacher), Eq. 5. forward: KL(teacher || student)."
    )
    top_k_warmup_steps: float = option(
        0.0,
        "Steps in which --top_k falls from 1 (beyond the paper); below 1, a share of the run.",
        interval="[0, inf)",
    )
    uld_weight: float = option(0.5, "Lambda of Eq. 6.", interval="(0, inf)")
    uld_pairing: Literal["position", "last"] = option(
        "position",
        "Compare a student token with the teacher token at the same position in the document "
        "(Boizard et al. 2025), or with the last one that covers it.",
    )
    rho1_score: Literal["loss", "loss_and_entropy"] = option(
        "loss",
        "loss: the top_k by excess loss. loss_and_entropy: of these, only tokens that are also in "
        "the top_k of lowest entropy in the reference (Lin et al. 2024, Appendix H).",
    )
    chunks: int = option(32, "Chunks per sequence (Section 6.1).", interval="[1, inf)")
    chunk_guidance: Literal["teacher", "random"] = option(
        "teacher",
        "teacher: compare chunks with the teacher's. random: pick whole chunks at random.",
    )
    chunk_selection: Literal["tokens", "chunks"] = option(
        "chunks",
        "Select whole chunks, or tokens by the loss of the teacher's chunk.",
    )
    teacher_reduction: Reduction = option(
        "mean",
        "How to combine the losses of several teachers. first: use the first store that has the "
        "document.",
    )
    teacher_weights: list[float] | None = option(
        None,
        "Weight of each teacher, for --teacher_reduction weighted.",
        interval="(0, inf)",
    )

    _argument_group_name = "method"

    def __post_init__(self) -> None:
        # The settings have the names of a user's class and function, not the objects.
        for name in ("method", "aggregation"):
            value = getattr(self, name)
            if not isinstance(value, str):
                setattr(self, name, name_own(name, value))
        check_options(self)
        if ":" in self.aggregation and not callable(load_own("aggregation", self.aggregation)):
            raise OptionError("aggregation", f"{self.aggregation} is not a function")
        # The other rules are about pairs of settings that are each valid alone.
        if self.own_objective and self.loss_divisor == "selected":
            raise OptionError(
                "loss_divisor",
                f"selected: {self.as_typed} counts its tokens itself, in divisor_tokens",
            )
        if self.method in ("chunk", "rho1") and self.aggregation == "share":
            raise OptionError(
                "aggregation",
                f"share counts characters, but {self.as_typed} compares tokens",
            )
        if self.method == "chunk" and self.selection != "top_k":
            raise OptionError(
                "selection",
                f"{self.selection} weighs each token, but {named('method')} chunk compares chunks",
            )
        if self.method == "rho1" and self.choice == "student":
            raise OptionError(
                "selection",
                f"{self.selection} has no teacher, and {named('method')} rho1 compares with one",
            )
        if self.with_entropies and self.unmapped == "mean":
            raise OptionError(
                "rho1_score", "loss_and_entropy cannot rank unmapped tokens, which have no entropy"
            )
        if self.with_entropies and self.loss_divisor == "selected":
            raise OptionError(
                "rho1_score",
                "loss_and_entropy knows the number of selected tokens too late for "
                f"{named('loss_divisor')} selected",
            )

    def in_effect(self) -> dict[str, object]:
        """Return the settings that the method reads; a reduction only if one was requested."""
        # Users are warned about every option that is not among these, so they must be exact. A
        # user's own method reads what the paper's method does.
        names = _READ_BY.get(self.method, {"aggregation"}) | {"method"}
        if self.weighs_alone:
            names = {"method", "selection"}
        elif self.choice != "all" or self.own_objective:
            names |= set(_CHOICE_SETTINGS)
        if self.choice == "guided":
            if not self.accepts:
                names |= {"selection", "unmapped"}
            # These two matter only with several teachers, whose number is not known here.
            for name in ("teacher_reduction", "teacher_weights"):
                if getattr(self, name) != getattr(Method, name):
                    names.add(name)
        else:
            names -= {"aggregation", "chunk_selection"}
        if self.choice == "student" and self.selection == "stm":
            names.add("stm_perplexity")
        return {name: value for name, value in vars(self).items() if name in names}

    def at_step(self, step: int, max_steps: int) -> "Method":
        """Return the method with the share of tokens for a step of the run."""
        # A warmup of less than one step means a share of the run.
        warmup = self.top_k_warmup_steps
        steps = math.ceil(max_steps * warmup) if warmup < 1 else int(warmup)
        if step >= steps:
            return self
        # Round the share to millionths, in which it is counted. The result has no warmup, because
        # it is for this step only.
        top_k = round(1 - (1 - self.top_k) * step / steps, 6)
        return replace(self, top_k=top_k, top_k_warmup_steps=0)

    @property
    def as_typed(self) -> str:
        """The method as typed on the command line."""
        if self.method == "chunk" and self.chunk_guidance == "random":
            return f"{named('method')} chunk {named('chunk_guidance')} random"
        if self.weighs_alone:
            return f"{named('method')} {self.method} {named('selection')} {self.selection}"
        return f"{named('method')} {self.method}"

    @property
    def own_objective(self) -> Any:
        """The class of a user's own method, an `Objective`; None for built-in methods."""
        if ":" not in self.method:
            return None
        own_class = load_own("method", self.method)
        # The base class is recognized by its name, because importing it would import torch.
        bases = []
        for base in getattr(own_class, "__mro__", ()):
            bases.append(f"{base.__module__}.{base.__qualname__}")
        if "vocagnolm.objective.Objective" not in bases:
            raise OptionError("method", f"{self.method} is not a subclass of vocagnolm.Objective")
        return own_class

    @property
    def choice(self) -> Literal["all", "random", "student", "guided"]:
        """How the weights of tokens are chosen. "student": by the student's own distribution."""
        own_class = self.own_objective
        if own_class:
            return "guided" if own_class.needs_teacher else "all"
        if self.method in ("cpt", "kld", "uld"):
            return "all"
        random_chunks = self.method == "chunk" and self.chunk_guidance == "random"
        if self.method == "random" or random_chunks:
            return "random"
        return "student" if self.selection in _WITHOUT_TEACHER else "guided"

    @property
    def accepts(self) -> bool:
        """True if tokens are weighted by acceptance, and none is ranked."""
        return self.choice == "guided" and self.selection == "accept"

    @property
    def weighs_alone(self) -> bool:
        """True if each token is weighted by its own losses, and none is ranked."""
        return self.accepts or self.choice == "student"

    @property
    def aggregation_in_effect(self) -> str:
        """How teacher losses are combined: acceptance compares losses of the same characters."""
        return "share" if self.accepts else self.aggregation

    @property
    def splits_alike(self) -> bool:
        """True if an update is the same for every split of a global batch."""
        # The share of a micro-batch and the mean loss of a batch depend on which sequences it has.
        settings = self.in_effect()
        return settings.get("selection_scope") != "batch" and settings.get("unmapped") != "mean"

    @property
    def needs_teacher(self) -> bool:
        """False for plain pretraining, random choices, and weights by the student alone."""
        return self.choice == "guided" or self.distance is not None

    @property
    def distance(self) -> Distance | None:
        """The distance that is added to the cross-entropy of every token, Eq. (5) and (6)."""
        if self.method == "kld":
            return "reverse_kl" if self.kld_direction == "reverse" else "forward_kl"
        return "sorted_l1" if self.method == "uld" else None

    @property
    def with_entropies(self) -> bool:
        """True if the method needs the entropies of the teacher's distributions."""
        by_entropy = self.method == "rho1" and self.rho1_score == "loss_and_entropy"
        return by_entropy and not self.accepts

    def check_teacher(self, count: int, *, is_stored: bool = False) -> None:
        """Reject a missing teacher, or one of the wrong kind or number."""
        if bool(count) != self.needs_teacher:
            options = f"{named('teacher')} or {named('teacher_losses')}"
            fault = f"needs a teacher: give {options}"
            if count:
                fault = f"does not use a teacher: drop {options}"
            raise ValueError(f"{self.as_typed} {fault}")
        compares = self.distance is not None or self.with_entropies
        if compares and (is_stored or count > 1):
            raise ValueError(
                f"{self.as_typed} compares distributions, which a store of losses does not hold: "
                f"give one teacher, with {named('teacher')}"
            )
        if self.teacher_reduction == "first" and count > 1 and not is_stored:
            raise OptionError(
                "teacher_reduction",
                "first needs stores, as the first teacher in memory has every "
                f"document: score each teacher's documents, and give {named('teacher_losses')}",
            )
        # Weights that no reduction reads are rejected, too, because they would silently be ignored.
        expected = count if self.teacher_reduction == "weighted" else 0
        weights = len(self.teacher_weights or ())
        if weights != expected:
            raise OptionError(
                "teacher_reduction",
                f"{self.teacher_reduction} takes {expected or 'no'} "
                f"{named('teacher_weights')}, found {weights}",
            )
