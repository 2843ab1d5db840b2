"""Cases of language models: tokens, the decisions that are scored, and the keys that each of them needs.

Two tasks make cases of any length for any vocabulary. In **induction** random tokens are repeated once, and a query of
the second half needs the token after its previous occurrence (Olsson et al. 2209.11895). In **passkey** a key is
planted at a depth among random tokens and asked for at the end (Mohtashami and Jaggi 2305.16300). Or cases come from a
file.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from interp.bridge import LanguageModel
from models.addition import generator
from models.config import InputError

TASKS = ("induction", "passkey")
KEY_TOKENS = 5  # of a passkey
MOST_LINES = 100_000  # of a file of cases


@dataclass(frozen=True)
class Case:
    """``tokens``: ids. ``decisions``: positions whose next token is scored. ``targets``: per decision the positions of
    the keys it needs, or None where it needs none; empty where nothing is known of targets.
    """

    tokens: tuple[int, ...]
    decisions: tuple[int, ...]
    targets: tuple[tuple[int, ...] | None, ...] = ()


def induction(vocabulary: int, length: int, n: int, seed: int = 0) -> list[Case]:
    """Random tokens repeated once; tokens are distinct within the half where the vocabulary allows.

    Raises:
        InputError: ``length`` below 4.
    """
    if length < 4:
        raise InputError(f"induction needs at least 4 tokens, got {length}")
    half = length // 2
    cases: list[Case] = []
    for i in range(n):
        rng = generator(seed, f"induction {length}", i)
        tokens = rng.permutation(vocabulary)[:half] if vocabulary >= half else rng.integers(0, vocabulary, half)
        decisions = range(half, 2 * half - 1)
        ids = tuple(int(t) for t in (*tokens, *tokens))
        cases.append(Case(ids, tuple(decisions), tuple((q - half + 1,) for q in decisions)))
    return cases


def passkey(vocabulary: int, length: int, n: int, seed: int = 0) -> list[Case]:
    """A marker and a key of five tokens at a random depth of random filler, and the marker again at the end.

    The decisions are the key's tokens after the second marker. The marker is nowhere else.

    Raises:
        InputError: a length or vocabulary that a marker and its key do not fit into.
    """
    least = 2 * (KEY_TOKENS + 1)
    if length < least:
        raise InputError(f"passkey needs at least {least} tokens, got {length}")
    if vocabulary < KEY_TOKENS + 2:
        raise InputError(f"passkey needs a vocabulary of at least {KEY_TOKENS + 2} tokens, got {vocabulary}")
    cases: list[Case] = []
    for i in range(n):
        rng = generator(seed, f"passkey {length}", i)
        marker = int(rng.integers(vocabulary))
        others = np.delete(np.arange(vocabulary), marker)
        body = rng.choice(others, size=length - KEY_TOKENS - 1)
        depth = int(rng.integers(0, len(body) - KEY_TOKENS))
        body[depth] = marker
        key = rng.choice(others, size=KEY_TOKENS, replace=False)
        body[depth + 1 : depth + 1 + KEY_TOKENS] = key
        tokens = tuple(int(t) for t in (*body, marker, *key))
        decisions = tuple(range(len(body), len(tokens) - 1))
        cases.append(Case(tokens, decisions, tuple((depth + 1 + j,) for j in range(KEY_TOKENS))))
    return cases


def read_cases(path: str | Path, model: LanguageModel) -> list[Case]:
    """Cases from a file, one JSON object a line.

    ``{"tokens": [ids]}`` or ``{"text": "..."}``, with ``"decisions"`` (all queries where left out) and ``"targets"``:
    per decision the position of the key it needs, a list of them, or null.

    Raises:
        InputError: the file or a line of it cannot be used; names the line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8") from error
    cases: list[Case] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if len(cases) == MOST_LINES:
            raise InputError(f"{path}: more than {MOST_LINES} cases; split the file")
        try:
            cases.append(_case(json.loads(line, object_pairs_hook=_once), number, model))
        except (ValueError, RecursionError) as error:  # of JSON too
            why = " ".join(str(error).split())[:160] or type(error).__name__
            raise InputError(f"{path}, line {number}: {why}") from error
    if not cases:
        raise InputError(f"{path}: no case; give one JSON object a line")
    return cases


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise InputError("a key is given twice")
    return found


def _case(found: Any, number: int, model: LanguageModel) -> Case:
    if not isinstance(found, dict):
        raise InputError('a case is an object such as {"tokens": [1, 2, 3]}')
    unknown = found.keys() - {"tokens", "text", "decisions", "targets"}
    if unknown:
        raise InputError(f"unknown key {sorted(unknown)[0][:40]!r}; there are tokens, text, decisions, targets")
    if ("tokens" in found) == ("text" in found):
        raise InputError("give either tokens or text")
    if "text" in found:
        if not isinstance(found["text"], str):
            raise InputError("text must be a string")
        if model.tokenizer is None:
            raise InputError(f"{model.name} has no tokenizer; give tokens")
        tokens = _tokenized(found["text"], model)
        start = model.tokenizer.bos_token_id
    else:
        tokens = _whole_numbers(found["tokens"], "tokens", model.vocabulary)
        start = getattr(model.config, "bos_token_id", None)
    if start is not None and tokens[:2] == (start, start):
        warnings.warn(f"line {number} begins with two start tokens ({start}); leave one of them out", stacklevel=2)
    if model.limit is not None and len(tokens) > model.limit:
        raise InputError(f"{model.name} has {model.limit} positions, got {len(tokens)} tokens; take a shorter input")
    if len(tokens) < 2:
        raise InputError(f"a case needs at least 2 tokens, got {len(tokens)}")
    decisions = tuple(range(len(tokens) - 1))
    if "decisions" in found:
        decisions = _whole_numbers(found["decisions"], "decisions", len(tokens) - 1)
        if not decisions or any(b <= a for a, b in pairwise(decisions)):
            raise InputError("decisions must be positions in rising order, at least one")
    if "targets" not in found:
        return Case(tokens, decisions)
    given = found["targets"]
    if not isinstance(given, list) or len(given) != len(decisions):
        raise InputError(f"targets must be a list of {len(decisions)}, one a decision")
    targets: list[tuple[int, ...] | None] = []
    for query, target in zip(decisions, given, strict=True):
        if target is None:
            targets.append(None)
            continue
        keys = _whole_numbers(target if isinstance(target, list) else [target], "targets", query + 1)
        targets.append(keys or None)
    return Case(tokens, decisions, tuple(targets))


def _tokenized(text: str, model: LanguageModel) -> tuple[int, ...]:
    try:
        tokens = tuple(model.tokenizer(text)["input_ids"])
    except Exception as error:  # of the tokenizer's own code
        why = " ".join(str(error).split())[:100]
        raise InputError(
            f"the tokenizer cannot read {text[:40]!r} ({type(error).__name__}: {why}); give tokens"
        ) from error
    if any(token >= model.vocabulary for token in tokens):
        raise InputError(f"the tokenizer gives {max(tokens)}, and the model's ids end at {model.vocabulary - 1}")
    return tokens


def _whole_numbers(values: Any, what: str, below: int) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
        raise InputError(f"{what} must be a list of whole numbers")
    for value in values:
        if not 0 <= value < below:
            raise InputError(f"{what} must be from 0 to {below - 1} here, got {value if abs(value) < 1e12 else '...'}")
    return tuple(values)
