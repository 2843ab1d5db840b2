"""What each head does: which lookup it performs, where its attention rests, and whether that survives at length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from interp.interventions import Head
from interp.ledger import CLASSES, Ledger
from models.addition import LOOKUPS

if TYPE_CHECKING:
    import pandas as pd

PERFORMS = 0.5  # mean share on a lookup's target from which a head performs it: the target outweighs all else
SINK_HEAD = 0.3  # mean share on the sink from which a head rests there (the study's bar for null keys, C11)
CROWD_HEAD = 0.5  # mean share on far keys from which the crowd outweighs all else
COLLAPSE = 0.5  # of its share at training length, what a role must keep at the longer length, or it has collapsed


@dataclass(frozen=True)
class Role:
    """One head. ``lookup``: what it performs at training length, or None. ``share``: on that lookup's target at
    training length and at the longer length. ``sink``, ``far``: mean share over all lookups, at both. ``collapsed``:
    its lookup, or its rest on the sink, kept less than :data:`COLLAPSE` of its share.
    """

    head: Head
    lookup: str | None
    share: tuple[float, float]
    sink: tuple[float, float]
    far: tuple[float, float]

    @property
    def is_sink_head(self) -> bool:
        return self.sink[0] >= SINK_HEAD

    @property
    def is_crowd_head(self) -> bool:
        """Gives most of its attention to far keys at the longer length."""
        return self.far[1] >= CROWD_HEAD

    @property
    def collapsed(self) -> bool:
        lost_lookup = self.lookup is not None and self.share[1] < COLLAPSE * self.share[0]
        return lost_lookup or (self.is_sink_head and self.sink[1] < COLLAPSE * self.sink[0])


@dataclass(frozen=True)
class Roles:
    """All heads, by layer and head."""

    roles: tuple[Role, ...]

    def to_frame(self) -> pd.DataFrame:
        """One row a head."""
        import pandas as pd

        return pd.DataFrame(self.to_json())

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {
                "layer": role.head[0],
                "head": role.head[1],
                "lookup": role.lookup,
                "share_trained": role.share[0],
                "share": role.share[1],
                "sink_trained": role.sink[0],
                "sink": role.sink[1],
                "far": role.far[1],
                "sink_head": role.is_sink_head,
                "crowd_head": role.is_crowd_head,
                "collapsed": role.collapsed,
            }
            for role in self.roles
        ]


def head_roles(trained: Ledger, longer: Ledger) -> Roles:
    """Roles from the ledgers of one model at a training length and at a longer one."""
    short, long = _Means(trained), _Means(longer)
    roles = []
    for layer, head in np.ndindex(*short.sink.shape):
        shares = {name: short.target[name][layer, head] for name in LOOKUPS if name in short.target}
        best = max(shares, key=lambda name: shares[name])
        performs = best if shares[best] >= PERFORMS else None
        at_length = long.target.get(best)
        roles.append(
            Role(
                head=(layer, head),
                lookup=performs,
                share=(float(shares[best]), float("nan") if at_length is None else float(at_length[layer, head])),
                sink=(float(short.sink[layer, head]), float(long.sink[layer, head])),
                far=(float(short.far[layer, head]), float(long.far[layer, head])),
            )
        )
    return Roles(tuple(roles))


class _Means:
    """Mean shares ``[layer, head]``: on each lookup's target, and on the sink and far keys over distinct queries."""

    def __init__(self, ledger: Ledger):
        self.target = {name: x.share.mean(-1) for (name, present), x in ledger.lookups.items() if present}
        # every query performs either first_same_column (a decision) or first_from_second (a chunk of b)
        both = [x for (name, _), x in ledger.lookups.items() if name in ("first_same_column", "first_from_second")]
        self.sink = np.concatenate([x.sink_share for x in both], axis=-1).mean(-1)
        far = CLASSES.index("far")
        self.far = np.concatenate([x.class_shares[..., far] for x in both], axis=-1).mean(-1)
