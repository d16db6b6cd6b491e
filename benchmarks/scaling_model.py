"""A model of ``moe_mlp`` on one GPU and on several, of what a GPU and its links are measured to do.

One GPU's layer is a sum of its kernels. On several, collectives and the copies around them are
added. Nothing overlaps. Units are milliseconds, bytes and operations.
"""

from __future__ import annotations

import dataclasses
import functools
import math

from jax_groupgemm._kernels.lists import MOST_COLUMNS_BACK, MOST_COLUMNS_FORWARD
from jax_groupgemm._moe.expert_parallel import chunk_of, share_of_devices

from .expert_memory import BFLOAT16, FLOAT32, INT32, Model

NODE = 8  # GPUs that NVLink connects


@dataclasses.dataclass(frozen=True)
class Machine:
    """The rates of a GPU and of its links.

    Measured beside the points below, on the same machine:

    Attributes:
      products: operations/ms of a large dense product.
      memory: bytes/ms of a copy, reads and writes.
      gathering: the same of a kernel that gathers rows (``combine``).
      all_gather: bytes/ms that arrive at a GPU, of 512 MiB over NVLink.
      all_to_all: the same.
      call: of a call from outside, beside its kernels (``h200/moe/layer_jax.json``).

    Fitted to the four points of "all_to_all":

    Attributes:
      loop: a turn of the loop of rounds, whose end the device decides.

    Assumed:

    Attributes:
      network: bytes/ms of a GPU to other nodes.
      latency: of a collective.
      peer: more, for each GPU of another node.
    """

    products: float = 788e9
    memory: float = 4.2e9
    gathering: float = 2.9e9
    all_gather: float = 268e6
    all_to_all: float = 298e6
    call: float = 0.09
    loop: float = 0.22
    network: float = 50e6
    latency: float = 0.03
    peer: float = 0.001


H200 = Machine()

# Shares of the floor at so many rows for each expert: the means of docs/performance.md.
ROWS = (32, 256, 1024)
SHARES = {
    "forward": (0.99, 0.83, 0.89),
    "dgrad": (1.00, 0.83, 0.89),
    "wgrad": (0.86, 0.77, 0.93),
}
# A product that gathers its rows takes so many times as long (docs/lab/moe_layer.md).
LISTED = {"forward": 9 / 8, "dgrad": 9 / 8, "wgrad": 4 / 3}


Parts = dict[str, float]


def share_of_floor(op: str, rows: float) -> float:
    """Between those that were measured, along the logarithm of rows."""
    shares = SHARES[op]
    for i in range(1, len(ROWS)):
        if rows < ROWS[i]:
            at = max(0.0, math.log(rows / ROWS[i - 1]) / math.log(ROWS[i] / ROWS[i - 1]))
            return shares[i - 1] + at * (shares[i] - shares[i - 1])
    return shares[-1]


@dataclasses.dataclass(frozen=True)
class Layer:
    """The layer on each GPU of a group that shares the experts, at an even routing.

    Attributes:
      tokens: of each GPU.
      group: GPUs that share the experts.
      transport: between them.
      copies: of the group, in other nodes, each with tokens of its own. Gradients of weights are
        added up over them.
      slack: ``max_rows``, in rows of an even routing; None for the worst case.
    """

    model: Model
    tokens: int
    group: int = 1
    transport: str | None = None
    copies: int = 1
    slack: float | None = None
    machine: Machine = H200

    def __post_init__(self):
        assert self.model.experts % self.group == 0
        assert (self.transport is None) == (self.group == 1)

    # ---- what there is ---------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        """Pairs of token and expert that exist."""
        return self.tokens * self.model.k

    @property
    def experts(self) -> int:
        return self.model.experts // self.group

    @property
    def room(self) -> int:
        """Pairs that there is room for."""
        worst = self.group * self.rows
        return worst if self.slack is None else min(worst, round(self.slack * self.rows))

    @property
    def arriving(self) -> int:
        """Tokens that there is room for."""
        every = self.group * self.tokens
        return min(every, self.room) if self.transport == "all_to_all" else every

    @property
    def share(self) -> float:
        return share_of_devices(self.model.k, self.experts, self.group)

    @property
    def chunk(self) -> int:
        return chunk_of(self.tokens, self.share)

    @property
    def rounds(self) -> int:
        return math.ceil(fullest(self.tokens, self.share, self.group**2) / self.chunk)

    # ---- kernels ---------------------------------------------------------------------------------

    def product(self, op: str, a: int, b: int, listed: bool = False) -> float:
        """``rows`` times (experts, a, b)."""
        flops = 2 * self.rows * a * b
        size = BFLOAT16 * (self.rows * (a + b) + min(self.experts, self.rows) * a * b)
        floor = max(flops / self.machine.products, size / self.machine.memory)
        of_expert = max(1.0, self.rows / self.experts)
        return floor / share_of_floor(op, of_expert) * (LISTED[op] if listed else 1)

    def moved(self, *widths: float) -> float:
        """Rows of so many elements, read or written."""
        return self.rows * sum(widths) * BFLOAT16 / self.machine.memory

    @property
    def copied(self) -> float:
        """Tokens as rows of pairs."""
        return self.rows * 2 * self.model.width * BFLOAT16 / self.machine.gathering

    @property
    def combined(self) -> float:
        """Rows of pairs as sums of the tokens that are here."""
        size = (self.rows + self.arriving) * self.model.width * BFLOAT16
        return size / self.machine.gathering

    @property
    def routed(self) -> float:
        """Indices of every pair: read twice, its row, and the pair of each row."""
        return (3 * self.arriving * self.model.k + self.room) * INT32 / self.machine.memory

    def up(self) -> Parts:
        d, hidden = self.model.width, 2 * self.model.hidden
        listed = hidden <= MOST_COLUMNS_FORWARD
        copied = {} if listed else {"dispatch": self.copied}
        return {"route": self.routed, **copied, "up": self.product("forward", d, hidden, listed)}

    def down(self) -> Parts:
        down = self.product("forward", self.model.hidden, self.model.width)
        return {"down": down, "combine": self.combined}

    def back(self) -> Parts:
        d, f = self.model.width, self.model.hidden
        parts: Parts = {"dispatch": self.copied}  # x, whose product has 2F columns
        assert 2 * f > MOST_COLUMNS_BACK
        listed = f <= MOST_COLUMNS_BACK
        if listed:
            # Sums of 16 columns, of as many rows as there is room for, are added up afterwards.
            sums = FLOAT32 * self.room * f / 16 / self.machine.memory
            parts["activation"] = self.moved(2 * f, 3 * f) + sums
        else:
            parts["dispatch"] += self.copied
            parts["activation"] = self.moved(3 * f, 3 * f)
        parts["dgrad"] = self.product("dgrad", d, f, listed) + self.product("dgrad", 2 * f, d)
        parts["wgrad"] = self.product("wgrad", f, d, listed) + self.product("wgrad", d, 2 * f)
        return {**parts, "combine": self.combined}

    # ---- between GPUs ----------------------------------------------------------------------------

    def collective(self, inside: float, rate: float, outside: float) -> float:
        """Bytes that come to a GPU over NVLink, and to it from other nodes. Both links are busy at
        the same time."""
        waiting = self.machine.latency + self.far * self.machine.peer
        return waiting + max(inside / rate, outside / self.machine.network)

    @property
    def near(self) -> int:
        """Other GPUs of this node."""
        return min(self.group, NODE) - 1

    @property
    def far(self) -> int:
        """GPUs of other nodes."""
        return max(0, self.group - NODE)

    def all_gather(self, width: float) -> float:
        """Every GPU gets the tokens of all. A node takes each of the others' once: each of its GPUs
        takes a part and passes it on, so all of it goes over NVLink."""
        size = self.tokens * width
        return self.collective(
            (self.group - 1) * size, self.machine.all_gather, self.far * size / NODE
        )

    def all_to_all(self, rows: int, width: float) -> float:
        """Every pair of GPUs exchanges ``rows``."""
        size = rows * width
        return self.collective(self.near * size, self.machine.all_to_all, self.far * size)

    def send(self, *widths: float) -> Parts:
        """Tokens of so many bytes each, in one go."""
        if self.transport is None:
            return {}
        if self.transport == "gather":
            return {"all-gather": sum(map(self.all_gather, widths))}
        leaving = self.tokens * min(self.model.k, self.group)
        meeting = self.share * self.group * self.tokens
        sorting = (meeting + leaving) * sum(widths) / self.machine.gathering
        return added({"copies": sorting}, self.rounds_of(widths, self.arriving))

    def collect(self, *widths: float) -> Parts:
        if self.transport is None:
            return {}
        if self.transport == "gather":
            read = (self.group + 1) * self.tokens * sum(widths) / self.machine.memory
            return {"all-to-all": sum(self.all_to_all(self.tokens, w) for w in widths), "sum": read}
        leaving = self.tokens * min(self.model.k, self.group)
        adding = (self.share * self.group + 1) * self.tokens * sum(widths) / self.machine.gathering
        return added({"copies": adding}, self.rounds_of(widths, leaving))

    def rounds_of(self, widths, size: int) -> Parts:
        """Zeros of ``size`` rows; a round reads and writes its block, and the rows that arrive."""
        block, meeting = self.group * self.chunk, self.share * self.group * self.tokens
        rows = size + 2 * (self.rounds * block + meeting)
        moving = self.rounds * sum(self.all_to_all(self.chunk, w) for w in widths)
        return {
            "copies": rows * sum(widths) / self.machine.memory,
            "all-to-all": moving,
            "loops": self.rounds * self.machine.loop,
        }

    @property
    def of_token(self) -> int:
        return self.model.width * BFLOAT16

    @property
    def of_pairs(self) -> int:
        """A token's indices, or its weights."""
        return self.model.k * INT32

    def sent(self) -> Parts:
        return added(self.send(self.of_pairs), self.send(self.of_token, self.of_pairs))

    def sent_back(self) -> Parts:
        return added(
            self.send(self.of_token, self.of_token), self.collect(self.of_token, self.of_pairs)
        )

    def reduced(self) -> Parts:
        """Weights' gradients over copies of the group, which are in other nodes."""
        if self.copies == 1:
            return {}
        size = 3 * self.experts * self.model.width * self.model.hidden * BFLOAT16
        time = 2 * (self.copies - 1) / self.copies * size / self.machine.network
        return {"all-reduce": self.machine.latency + self.copies * self.machine.peer + time}

    # ---- the whole -------------------------------------------------------------------------------

    def forward(self) -> Parts:
        call = {"call": self.machine.call}
        return added(call, self.sent(), self.up(), self.down(), self.collect(self.of_token))

    def gradients(self) -> Parts:
        """As they were measured: without the result."""
        call = {"call": self.machine.call}
        return added(call, self.sent(), self.up(), self.sent_back(), self.back(), self.reduced())

    def both(self) -> Parts:
        """The result and all gradients, as in a training step."""
        return added(self.gradients(), self.down(), self.collect(self.of_token))


def added(*parts: Parts) -> Parts:
    return {name: sum(p.get(name, 0.0) for p in parts) for of in parts for name in of}


def total(parts: Parts) -> float:
    return sum(parts.values())


@functools.cache
def fullest(tokens: int, share: float, pairs: int) -> int:
    """The most of ``tokens`` that one of so many pairs of devices has, each with chance ``share``:
    half of all routings have no more."""
    if share >= 1:
        return tokens
    here, each = math.lgamma(tokens + 1), math.log(share / (1 - share))
    m = max(1, math.ceil(share * tokens))
    while m < tokens:
        log = here - math.lgamma(m + 1) - math.lgamma(tokens - m + 1) + m * each
        log += tokens * math.log1p(-share)
        falling = (tokens - m) / (m + 1) * share / (1 - share)
        if falling < 1 and pairs * math.exp(log) * falling / (1 - falling) < math.log(2):
            return m
        m += 1
    return tokens
