"""The longest context that fits, and for a length the fastest configuration that does.

Candidates are layouts P x R, heads per stage, what waits where, and how states are sharded. Each is simulated at two
short lengths (``extrapolate.py``); how long it takes is ``speed.py``'s model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import lcm

from megatron_upipe.attention.schedule import fitting_ulysses_sizes, legal_heads_per_stage
from megatron_upipe.context.merge import MOST_IN_LOW_PRECISION
from megatron_upipe.errors import UPipeError
from megatron_upipe.planning.report import Report, host_bytes, least_device_bytes, report
from megatron_upipe.planning.scenario import Scenario, tokens_text
from megatron_upipe.planning.speed import Machine, Time, step_time
from megatron_upipe.planning.states import GIB

EVERY = (1, 2, 4, 8)
SMALL_TILES = dict(mlp_tile_tokens=1024, loss_tile_tokens=256)
AS_FAST = 1.01  # what the speed model cannot tell apart
QUANTUM = 2**16  # tokens; longest contexts are multiples of it


@dataclass(frozen=True)
class Limits:
    """Bytes for training: of a GPU, less the reserve, and of a node's host memory."""

    device: float
    host: float


@dataclass(frozen=True)
class Choice:
    """A configuration that fits, what it needs and how long a step takes."""

    report: Report
    time: Time


@dataclass(frozen=True)
class Search:
    """``base``: model, GPUs, sharding, optimizer, kernel and whatever else is not searched for. ``fixed``: fields of it
    that the user has chosen. ``say`` is told what is being looked at."""

    base: Scenario
    fixed: frozenset[str]
    limits: Limits
    machine: Machine
    say: Callable[[str], None]

    def longest(self) -> Scenario:
        """With the most tokens, a multiple of ``QUANTUM``, in the least memory.

        Raises UPipeError where nothing fits.
        """
        for tiles in ({}, SMALL_TILES):  # small ones only where nothing else fits
            best: Scenario | None = None
            for one in self._in_least_memory(tiles):
                found = best.tokens if best else 0
                if self._may_fit(replace(one, tokens=found + self._unit)):
                    self.say(f"{_named(one)}: {tokens_text(found) if found else 'nothing'} so far")
                    tokens = self._longest_of(one)
                    best = replace(one, tokens=tokens) if tokens > found else best
            if best is not None:
                return best
        raise UPipeError(self._nothing_fits())

    def fastest(self, tokens: int, layout: Scenario | None = None) -> Choice:
        """Layouts are taken in the order of their speed, and of those that fit the first; or only ``layout``.

        Raises UPipeError where nothing fits, naming the longest context that does.
        """
        layouts = list(self._layouts(tokens)) if layout is None else [layout]
        for tiles in ({}, SMALL_TILES):
            found = self._all_that_fit([replace(one, **self._free(tiles)) for one in layouts])
            if found:
                return self._prefetching(self._overlapping(self._more_heads(_best(found))))
        raise UPipeError(f"--tokens {tokens_text(tokens)} fits in no configuration; {self._nearest()}")

    def _all_that_fit(self, layouts: list[Scenario]) -> list[Choice]:
        """One for each way of sharding states, and of what waits where."""
        found: list[Choice] = []
        for sharding in self._values("sharding", ("distributed-optimizer", "megatron-fsdp")):
            for offload in self._offloads():
                for every in self._every():
                    policy = dict(
                        sharding=sharding, offload=offload, checkpoint_every=every, prefetch="off", overlap="off"
                    )
                    choice = self._first_that_fits(layouts, policy)
                    if choice is None:
                        continue
                    found.append(choice)
                    self.say(f"found {choice.time.step:,.1f} s a step: {_named(choice.report.scenario)}")
                    if choice.report.work.attention_forward_runs == 1:
                        break  # keeping fewer inputs gains nothing more
        return found

    def _nearest(self) -> str:
        try:
            return f"the longest context that does is {tokens_text(self.longest().tokens)}"
        except UPipeError as error:
            return str(error)

    def _first_that_fits(self, layouts: list[Scenario], policy: dict) -> Choice | None:
        for layout in layouts:
            one = replace(layout, **self._free(policy))
            if self._may_fit(one if "keep_attention" in self.fixed else replace(one, keep_attention=0)):
                self.say(f"{tokens_text(one.tokens)}: {_named(one)}")
                kept = self._most_kept(one)
                if kept is not None:
                    return self._choice(replace(one, keep_attention=kept))
        return None

    def _choice(self, scenario: Scenario) -> Choice:
        done = report(scenario)
        return Choice(done, step_time(scenario, done.work, self.machine))

    def _more_heads(self, best: Choice) -> Choice:
        """With as many heads per stage as fit, where that is faster."""
        if "heads_per_stage" in self.fixed:
            return best
        scenario = best.report.scenario
        model, tp = scenario.model, scenario.tensor_parallel
        for heads in legal_heads_per_stage(model.heads // tp, model.kv_heads // tp, scenario.sizes[0])[1:]:
            one = replace(scenario, heads_per_stage=heads)
            self.say(f"{tokens_text(one.tokens)}: {_named(one)}")
            if not self._fits(one):
                break
            best = _best([best, self._choice(one)])
        return best

    def _overlapping(self, best: Choice) -> Choice:
        one = replace(best.report.scenario, overlap="on")
        if "overlap" in self.fixed or len(one.schedule.stages) == 1 or not self._fits(one):
            return best
        return self._choice(one)

    def _prefetching(self, best: Choice) -> Choice:
        one = replace(best.report.scenario, prefetch="on")
        if "prefetch" in self.fixed or one.offload == "none" or not self._fits(one):
            return best
        return _best([best, self._choice(one)])

    def _layouts(self, tokens: int | None = None) -> Iterator[Scenario]:
        """All P x R that the heads allow, in the order of their speed: within a node first.

        U is the least with which stages are few enough for sums in bf16: smaller stages save less than a dx in fp32
        costs, unless heads are wider than the hidden state.
        """
        self.base.check_ranks()
        base = replace(self.base, tokens=tokens or self._unit)
        tp, ranks, model = base.tensor_parallel, base.context_parallel, base.model
        heads = model.heads // tp, model.kv_heads // tp
        sizes = [p for p in fitting_ulysses_sizes(*heads) if ranks % p == 0]
        if "ulysses" in self.fixed:
            sizes = [base.ulysses]
        elif "ring" in self.fixed:
            sizes = [max(1, ranks // base.ring)]
        # a ring alone is slow, and no exchange makes its stages small
        sizes = [p for p in sizes if p > 1 or len(sizes) == 1]
        sizes.sort(key=lambda p: (p * tp > base.gpus_per_node, -p))
        refused: list[UPipeError] = []
        for p in sizes:
            layout = replace(base, ulysses=p, ring=base.ring if "ring" in self.fixed else max(1, ranks // p))
            try:
                layout.check()
            except UPipeError as error:
                refused.append(error)
                continue
            legal = legal_heads_per_stage(*heads, p)
            few = [u for u in legal if heads[0] // u <= MOST_IN_LOW_PRECISION]
            wide = model.heads * model.head_dim > model.hidden
            for u in self._values("heads_per_stage", (few[0], legal[0]) if wide and few[0] > legal[0] else (few[0],)):
                yield replace(layout, heads_per_stage=u)
        if len(refused) == len(sizes):
            raise refused[0]

    @property
    def _unit(self) -> int:
        """Tokens that all layouts can share out."""
        return lcm(QUANTUM, 2 * self.base.context_parallel * self.base.tensor_parallel)

    def _offloads(self) -> list[str]:
        if "prefetch" in self.fixed and self.base.prefetch == "on":
            return ["host"]
        return self._values("offload", ("none", "host"))

    def _every(self) -> list[int]:
        return self._values("checkpoint_every", tuple(k for k in EVERY if k <= self.base.model.layers))

    def _in_least_memory(self, tiles: dict) -> Iterator[Scenario]:
        """All layouts, with as little kept as can be."""
        least = dict(prefetch="off", overlap="off", keep_attention=0, **tiles)
        for layout in self._layouts():
            for offload in reversed(self._offloads()):
                for every in reversed(self._every()):
                    policy = dict(least, offload=offload, checkpoint_every=every)
                    yield replace(layout, **self._free(policy))

    def _values(self, name: str, values: tuple) -> list:
        return [getattr(self.base, name)] if name in self.fixed else list(values)

    def _free(self, changes: dict) -> dict:
        return {name: value for name, value in changes.items() if name not in self.fixed}

    def _longest_of(self, scenario: Scenario) -> int:
        unit = self._unit
        return unit * _most(lambda units: self._fits(replace(scenario, tokens=units * unit)), least=1)

    def _may_fit(self, scenario: Scenario) -> bool:
        """Cheap to ask."""
        return host_bytes(scenario) <= self.limits.host and least_device_bytes(scenario) <= self.limits.device

    def _fits(self, scenario: Scenario) -> bool:
        return self._may_fit(scenario) and report(scenario).fits(self.limits.device, self.limits.host)

    def _most_kept(self, policy: Scenario) -> int | None:
        """Layers that keep their attention; None: it does not fit even without."""
        layers = policy.model.layers
        if "keep_attention" in self.fixed:
            return policy.layers_kept if self._fits(policy) else None
        by_formula = _most(lambda kept: kept <= layers and self._may_fit(replace(policy, keep_attention=kept)), least=0)
        if self._fits(replace(policy, keep_attention=by_formula)):
            return by_formula
        if not self._fits(replace(policy, keep_attention=0)):
            return None
        return _most(lambda kept: kept < by_formula and self._fits(replace(policy, keep_attention=kept)), least=0)

    def _nothing_fits(self) -> str:
        """Why, and how many GPUs would do, by their states."""
        base, wanted, tokens = self.base, self.limits.device, self._unit
        least = min(self._in_least_memory(SMALL_TILES), key=host_bytes)
        needed = report(least).device_peak
        text = (
            f"--gpus {base.gpus} do not hold {base.model.name}: {tokens_text(tokens)} tokens need "
            f"{needed / GIB:.1f} GiB of {wanted / GIB:.1f}"
        )
        if needed <= wanted:
            given, most = self.limits.host / GIB, host_bytes(least) / GIB
            return f"--host-memory {given:g} is too little for {tokens_text(tokens)} tokens; the least is {most:.1f}"
        for more in range(1, 8):
            one = replace(base, gpus=base.gpus * 2**more, ulysses=None, ring=1)
            if _states(one) + (needed - _states(least)) < wanted:
                return f"{text}; the nearest that do are --gpus {one.gpus}"
        return f"{text}; use cards with more memory"


def _states(scenario: Scenario) -> int:
    return scenario.states.sharded + scenario.states.unsharded_layer


def _named(scenario: Scenario) -> str:
    p, r = scenario.sizes
    waits = f"{scenario.offload}, every {scenario.checkpoint_every}"
    return f"P {p} x R {r}, U {scenario.schedule.heads_per_stage}, {scenario.sharding}, {waits}"


def _best(choices: list[Choice]) -> Choice:
    """The fastest; of those as fast, the one with the least device memory."""
    slowest = AS_FAST * min(choice.time.step for choice in choices)
    return min((c for c in choices if c.time.step <= slowest), key=lambda choice: choice.report.device_peak)


def _most(fits: Callable[[int], bool], least: int) -> int:
    """The largest number that fits where all smaller ones do; 0 if ``least`` does not."""
    if not fits(least):
        return 0
    low, high = least, max(1, 2 * least)
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
