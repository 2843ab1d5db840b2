"""Named training recipes: everything that a trained checkpoint depends on but its seed."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

from pydantic import Field, model_validator

from models.config import (
    AdderConfig,
    AttentionConfig,
    Frozen,
    InputError,
    Lengths,
    NeuralGpuConfig,
    TaskConfig,
    TuringConfig,
)

R = TypeVar("R", bound=Frozen)


class Recipe(Frozen):
    """One way to train one model.

    ``steps`` of AdamW on ``batch`` fresh problems each, learning rate warmed up linearly over ``warmup`` steps and then
    lowered by a cosine to 0, or, with ``cooldown``, held until that share of training and then lowered linearly to 3%;
    gradients are clipped to norm ``clip``; weight decay acts on weight matrices alone, not on embeddings, biases,
    sinks, null keys, gates or kernels.

    ``kernel_rate``
        Learning rate of the kernels of counts, as a multiple of the others'. Adam moves a weight by at most about the
        learning rate a step, and a kernel has to grow to the size of a score, not of a weight.
    ``sink_pressure``
        B: in training a boost drawn from ``U(0, B)``, one draw per sequence, is added to every sink score, so that each
        lookup has to outbid a crowd of ``e**B`` keys. The model is evaluated with the boost in its configuration.
    ``key_pressure``
        In training each key is boosted with probability ``key_pressure_rate`` by ``U(0, key_pressure)``, one
        draw per layer and sequence, in all heads: any key may stand for a crowd, so that every lookup has to win by so
        much.
    ``gate_penalty``
        Weight of ``mean(gate (1 - gate))``, and the same of resets, in the loss: at 0 only for gates of 0 or 1.
    ``pressure_ramp``, ``penalty_ramp``
        Shares of training between which the pressures, and the penalty, grow from nothing to their full size.
    ``exact_from``
        Share of training from which the model's exact counters are exact; before it they are soft.
    ``micro_batches``
        A step's problems are sorted by length and run in so many parts, which saves padding; their gradients
        are summed.
    ``keep_every``
        A checkpoint is kept each so many steps, in ``steps/`` beside the final one (None: none is).
    """

    name: str
    about: str
    model: AdderConfig
    steps: int = Field(ge=1, le=10**9)
    batch: int = Field(ge=1, le=2**20)
    micro_batches: int = Field(default=2, ge=1)
    keep_every: int | None = Field(default=None, ge=1)
    learning_rate: float = Field(default=2e-3, gt=0)
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = Field(default=0.1, ge=0)
    warmup: int = Field(default=100, ge=0)
    clip: float = Field(default=1.0, gt=0)
    kernel_rate: float = Field(default=1.0, gt=0)
    cooldown: float | None = Field(default=None, ge=0, lt=1)
    sink_pressure: float = Field(default=0.0, ge=0)
    key_pressure: float = Field(default=0.0, ge=0)
    key_pressure_rate: float = Field(default=0.1, gt=0, le=1)
    pressure_ramp: tuple[float, float] = (0.0, 0.0)
    gate_penalty: float = Field(default=0.0, ge=0)
    penalty_ramp: tuple[float, float] = (0.0, 0.0)
    exact_from: float = Field(default=0.0, ge=0, le=1)
    precision: Literal["auto", "float32", "bfloat16"] = "auto"

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        if self.batch % self.micro_batches:
            raise ValueError(f"micro_batches must divide batch, got {self.micro_batches} and {self.batch}")
        if self.sink_pressure and not self.model.attention.sink:
            raise ValueError(f"sink_pressure={self.sink_pressure} needs a model with a sink")
        if (self.gate_penalty or self.exact_from) and self.model.attention.scheme != "counters":
            raise ValueError(
                f"gate_penalty={self.gate_penalty} and exact_from={self.exact_from} need a model with counters"
            )
        for name, (start, full) in (("pressure_ramp", self.pressure_ramp), ("penalty_ramp", self.penalty_ramp)):
            if not 0 <= start <= full <= 1:
                raise ValueError(f"{name} must be two shares of training in order, got {start} and {full}")
        return self


def _counters(name: str, about: str, attention: dict[str, Any], **changes: Any) -> Recipe:
    return Recipe(
        name=name,
        about=about,
        model=AdderConfig(attention=AttentionConfig(scheme="counters", null_key=True, **attention)),
        **{"steps": 2000, "batch": 128, "micro_batches": 4, **changes},
    )


def _one_digit(
    name: str,
    about: str,
    attention: AttentionConfig,
    n_heads: int = 4,
    task: TaskConfig | None = None,
    **changes: Any,
) -> Recipe:
    return Recipe(
        name=name,
        about=about,
        model=AdderConfig(task=task or TaskConfig(), attention=attention, n_heads=n_heads),
        **{"batch": 256, "micro_batches": 4, **changes},
    )


# With 4 frequencies a coordinate, base 100 turns by 1, .32, .1 and .03 radians a column. Base 10000 leaves only the
# first to tell columns apart, which comes round after 6.3 columns: keys 6 columns to either side look alike.
RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        _one_digit(
            "1digit-rotary2d",
            "rotation by row and column, decay .3 per column, sink: dilutes beyond its training lengths",
            AttentionConfig(scheme="rotary2d", rotary_base=100.0, decay=0.3, separator_column=-1),
            n_heads=8,
            steps=1000,
            learning_rate=3e-3,
        ),
        _one_digit(
            "1digit-rotary2d-pressure",
            "rotation, decay 1 and sink with sink pressure 12: every lookup has to outbid a crowd of e^12 keys",
            AttentionConfig(scheme="rotary2d", rotary_base=100.0, decay=1.0, separator_column=-1, sink_boost=12.0),
            steps=2000,
            learning_rate=3e-3,
            sink_pressure=12.0,
        ),
        _one_digit(
            "1digit-rotary",
            "the study's baseline: rotation by token position, no decay, no sink",
            AttentionConfig(scheme="rotary", rotary_base=100.0, sink=False),
            steps=3000,
        ),
        _one_digit(
            "1digit-rotary-long",
            "the same, with problems of 20 to 40 digits for a fifth of training",
            AttentionConfig(scheme="rotary", rotary_base=100.0, sink=False),
            task=TaskConfig(
                max_digits=40,
                mix=(
                    Lengths(min_digits=1, max_digits=10, share=0.8),
                    Lengths(min_digits=20, max_digits=40, share=0.2),
                ),
            ),
            batch=128,
            micro_batches=8,
            steps=6000,
        ),
        _one_digit(
            "1digit-nope",
            "no positions at all: the causal mask alone tells order",
            AttentionConfig(scheme="none", sink=False),
            steps=6000,
        ),
        _one_digit(
            "1digit-alibi",
            "ALiBi: a fixed penalty per token of distance, one slope a head",
            AttentionConfig(scheme="alibi", sink=False),
            steps=4000,
        ),
        _one_digit(
            "1digit-fire",
            "FIRE: a learned function of the distance over the query's position",
            AttentionConfig(scheme="fire", sink=False),
            steps=3000,
        ),
        _one_digit(
            "1digit-cope",
            "CoPE: every head counts from the key to the query, and looks the count's embedding up",
            AttentionConfig(scheme="cope", sink=False),
            steps=6000,
        ),
        _one_digit(
            "1digit-coupling",
            "position coupling: digits of equal significance share an id, starting anywhere in training",
            AttentionConfig(scheme="coupling", sink=False, separator_column=-1),
            steps=3000,
        ),
        _counters(
            "1digit-counters",
            "no positions: heads count for themselves, with gates that are sigmoids",
            {},
        ),
        _counters(
            "1digit-counters-switched",
            "the same, switched to exact gates (straight-through) when it adds its training lengths",
            {"exact_counters": 2},
            steps=1800,
            exact_from=2 / 3,
        ),
        _counters(
            "1digit-counters-exact-soft",
            "one counter of each head exact from the start, the other soft",
            {"exact_counters": 1},
        ),
        _counters(
            "1digit-counters-exact",
            "gates driven to 0 or 1 by a penalty, then pressure on random keys; exact at evaluation",
            {"exact_counters": 2, "kernel_beyond": "constant"},
            steps=7000,
            learning_rate=1.5e-3,
            cooldown=0.6,
            gate_penalty=1.0,
            penalty_ramp=(0.15, 0.3),
            key_pressure=9.0,
            key_pressure_rate=0.12,
            sink_pressure=3.0,
            pressure_ramp=(0.3, 0.85),
            exact_from=1.0,
        ),
    )
}


class LanguageRecipe(Frozen):
    """``steps`` of AdamW on ``batch`` fresh sequences of ``shortest`` to ``longest`` tokens, one length a step; the
    learning rate is warmed up over ``warmup`` steps and then lowered by a cosine to 0.
    """

    name: str
    about: str
    vocabulary: int = Field(default=128, ge=8)
    shortest: int = Field(default=8, ge=4)
    longest: int = Field(default=64, ge=4)
    positions: int = Field(default=512, ge=4)
    layers: int = Field(default=2, ge=1)
    heads: int = Field(default=4, ge=1)
    width: int = Field(default=64, ge=8)
    rotary_base: float = Field(default=10_000.0, gt=1)
    steps: int = Field(default=3000, ge=1)
    batch: int = Field(default=64, ge=1)
    learning_rate: float = Field(default=2e-3, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    warmup: int = Field(default=100, ge=0)

    @model_validator(mode="after")
    def _fits(self) -> LanguageRecipe:
        if not self.shortest <= self.longest <= self.positions:
            raise ValueError(f"lengths must rise: {self.shortest}, {self.longest}, {self.positions} positions")
        if self.vocabulary < self.longest // 2:
            raise ValueError(f"a vocabulary of {self.vocabulary} has no {self.longest // 2} distinct tokens")
        return self


LANGUAGE_RECIPES: dict[str, LanguageRecipe] = {
    recipe.name: recipe
    for recipe in (
        LanguageRecipe(
            name="induction-llama",
            about="a language model of 2 layers that repeats random tokens, up to 64 of them",
        ),
    )
}


class MachineRecipe(Frozen):
    """``steps`` of Adam on ``batch`` fresh problems each; the learning rate is warmed up over ``warmup`` steps and then
    lowered by a cosine to 0; gradients are clipped to norm ``clip``.

    ``curriculum``: share of training over which the longest problem drawn grows from 3 cells to the longest of all, as
    in Kaiser and Sutskever (1511.08228, section 3), by steps here and not by success. Each step draws one longest
    length of those.
    """

    name: str
    about: str
    model: NeuralGpuConfig | TuringConfig = Field(discriminator="machine")
    steps: int = Field(ge=1, le=10**9)
    batch: int = Field(ge=1, le=2**20)
    learning_rate: float = Field(default=1e-3, gt=0)
    warmup: int = Field(default=50, ge=0)
    clip: float = Field(default=1.0, gt=0)
    cooldown: float | None = None
    curriculum: float = Field(default=0.0, ge=0, le=1)
    precision: Literal["float32"] = "float32"


MACHINE_RECIPES: dict[str, MachineRecipe] = {
    recipe.name: recipe
    for recipe in (
        MachineRecipe(
            name="binary-neural-gpu",
            about="a Neural GPU that adds binary numbers: as many steps as the tape has cells",
            model=NeuralGpuConfig(),
            steps=2500,
            batch=64,
            learning_rate=3e-3,
            curriculum=0.3,
        ),
        MachineRecipe(
            name="copy-ntm",
            about="a Neural Turing Machine that copies 1 to 20 symbols",
            model=TuringConfig(),
            steps=3000,
            batch=32,
            learning_rate=5e-3,
            curriculum=0.5,
        ),
    )
}


def named_recipe(name: str, steps: int | None = None) -> Recipe:
    """The recipe of this name, with another number of steps if given (the schedule stretches with it).

    Raises:
        InputError: no such recipe, or ``steps`` below 1.
    """
    if name not in RECIPES:
        raise InputError(f"no recipe is called {name[:60]!r}; `leaksum recipes` lists them")
    return _with_steps(RECIPES[name], steps)


def trainable_recipe(name: str, steps: int | None = None) -> Recipe | MachineRecipe:
    """As :func:`named_recipe`, those of machines included."""
    return _with_steps(MACHINE_RECIPES[name], steps) if name in MACHINE_RECIPES else named_recipe(name, steps)


def _with_steps(recipe: R, steps: int | None) -> R:
    if steps is None:
        return recipe
    if steps < 1:
        raise InputError(f"steps must be at least 1, got {steps}")
    return recipe.model_copy(update={"steps": steps})


def kept_at(recipe: Recipe | MachineRecipe, step: int) -> bool:
    """Whether a run of this recipe keeps a checkpoint on the way at this step; the last step's is the run's own."""
    every = recipe.keep_every if isinstance(recipe, Recipe) else None
    return every is not None and 0 < step < recipe.steps and step % every == 0


def keeping(recipe: Recipe, every: int) -> Recipe:
    """The recipe, keeping a checkpoint each so many steps; the weights are the same to the last bit.

    Raises:
        InputError: ``every`` below 1, or so small that more than a thousand would be kept.
    """
    if every < 1 or recipe.steps / every > 1000:
        least = -(-recipe.steps // 1000)
        raise InputError(f"keep-every must be at least {least} for {recipe.steps} steps, got {every}")
    return recipe.model_copy(update={"keep_every": every})
