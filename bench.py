"""Is gated_delta_jit right on this machine, how fast is it, against what, and how far from the limit?

    python bench.py                the whole run: two minutes on a GPU, half a minute on a CPU, compiling apart
    python bench.py --fla          flash-linear-attention beside it (pip install fla-core; it tunes itself for minutes)
    python bench.py --shapes 8,2048,16,64:bf16 1,32768,16,128:bf16:float32      your shapes B,T,H,D, types and gate type
    python bench.py --from FILE    tables, --csv, --markdown and --plot of the --json FILE of an earlier run

Sections: "precision" compares with float64, by kind of gate; "seed" is the shape of the original loop, beside the
loop itself, torch.add and the limits of the machine; "short" decode-like and other small shapes; "decode" single steps
from a state with gated_delta_step; "training" and "long" shapes of real models, where memory traffic should count and
nothing else; "grid" many sizes, ours alone.

Method: a result is compared with a float64 oracle before it is timed, at every shape and for four kinds of gate; the
exit status is 1 when ours is wrong. Large shapes are compared on some of the heads, and all others must be finite. A
peer that fails or is off by more than 3 % is shown with its error and not timed. "graph" is the time per call inside a
replayed CUDA graph (GPU time, no launch cost from Python), "eager" the wall time per call as a program sees it; calls
that are compared eagerly take turns. Figures are medians after a warm-up, +- is half the distance between the
quartiles. Inputs that fit well into L2 stay there; larger ones rotate through enough buffers to exceed it. The floor is
a kernel that touches every input and output byte once or, for what exceeds L2 and for forward plus backward, the bytes
over the rate of a copy (forward: 4 arrays in, 1 out; backward: 5 more in, 4 out; decoding: the state in and out, in
place); both are measured in the same run.
The error of forward plus backward is the worst gradient's. "x ours" is a row's time over ours at the same shape, timed
the same way. Tables go to stdout, progress to stderr. Ctrl-C keeps what was measured; the exit status is then 130.
"""

import argparse
import concurrent.futures
import contextlib
import csv
import dataclasses
import datetime
import gc
import importlib.metadata
import importlib.util
import itertools
import json
import math
import multiprocessing
import os
import platform
import statistics
import sys
import textwrap
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TextIO

import torch

from reference import Model, gated_delta_reference

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

# Norm of the error over norm of the float64 result, on the same rounded inputs.
TOLERANCE = {torch.float32: 3e-7, torch.float64: 1e-14, torch.float16: 1e-3, torch.bfloat16: 2.5e-3}
# The same where tensor cores compute: half-precision operands are rounded on the way, float32 ones are split in parts.
TENSOR_CORE_TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}
# The same of each gradient alone.
GRADIENT_TOLERANCE = {torch.float32: 3e-6, torch.float64: 1e-13, torch.float16: 2e-3, torch.bfloat16: 1e-2}
GRADIENTS = ("dq", "dk", "dv", "dgate", "dstate")  # dstate: of the initial state
# A peer further off than this is shown as wrong and not timed. TF32 and bf16 states stay well below.
PEER_LIMIT = 3e-2

FORWARD = "forward"
TRAINING = "forward plus backward"
STEP = "one step"
OURS = "gated_delta_jit"
LOOP = "reference loop"
TOUCH = "every byte touched once"
EMPTY = "empty launch"

Arguments = tuple[torch.Tensor, ...]  # q, k, v, gate and, in training, dy, or the state of a decoding step
Call = Callable[[], object]
Errors = list[tuple[str, str, float]]  # kind of gate, "y" or the gradient's name, error


# ----------------------------------------------------------------------------------------------------------------------
# Problems and inputs
# ----------------------------------------------------------------------------------------------------------------------

SHORT_NAMES = {torch.float32: "f32", torch.float64: "f64", torch.float16: "fp16", torch.bfloat16: "bf16"}
LONG_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in SHORT_NAMES}


@dataclass(frozen=True)
class Problem:
    """One size: q, k, v, gate and y all have shape (B, T, H, D). The gate has its own type where one is given."""

    B: int
    T: int
    H: int
    D: int
    dtype: torch.dtype = torch.float32
    own_gate_dtype: torch.dtype | None = None

    @property
    def gate_dtype(self) -> torch.dtype:
        return self.own_gate_dtype or self.dtype

    @property
    def state_dtype(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.B, self.T, self.H, self.D

    @property
    def types(self) -> str:
        """Short, for tables: "bf16", or "bf16+f32" with another type of gate."""
        names = [SHORT_NAMES[self.dtype], SHORT_NAMES[self.gate_dtype]]
        return "+".join(dict.fromkeys(names))

    def bytes(self, what: str = FORWARD) -> int:
        """Every input byte once and every output byte once; the backward reads all inputs again, and dy."""
        halves, gates = (11, 3) if what == TRAINING else (4, 1)
        states = 2 * self.B * self.H * self.D**2 * self.state_dtype.itemsize if what == STEP else 0
        return (halves * self.dtype.itemsize + gates * self.gate_dtype.itemsize) * math.prod(self.shape) + states

    def __str__(self) -> str:
        return f"{self.shape} {self.types}"


SEED = Problem(B=2, T=128, H=4, D=24)


def in_dtype(problems: Sequence[Problem], dtype: torch.dtype | None) -> list[Problem]:
    """The same sizes in one type, each once; a float32 gate stays beside half precision. None: as they are."""
    if dtype is None:
        return list(problems)
    gate_dtypes = [problem.own_gate_dtype if dtype.itemsize == 2 else None for problem in problems]
    pairs = zip(problems, gate_dtypes, strict=True)
    return list(dict.fromkeys(replace(problem, dtype=dtype, own_gate_dtype=gate) for problem, gate in pairs))


def on_tensor_cores(problem: Problem) -> bool:
    """Whether the tensor-core kernel may serve this problem on a GPU. Problems as small as the seed never take it."""
    elements = problem.B * problem.H * problem.D**2
    widest = 128 if problem.dtype == torch.float32 else 256
    fits = problem.dtype in TENSOR_CORE_TOLERANCE and problem.D % 8 == 0 and problem.D <= widest
    large = elements >= 16384 or (elements >= 8192 and problem.T >= 256) or problem.T >= 2048
    return fits and problem.T >= 16 and large


GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sigmoid": torch.sigmoid,
    "around 1e-4": lambda x: 1e-4 * torch.exp(0.5 * x),
    "around 1e-20": lambda x: 1e-20 * torch.exp(0.5 * x),
    "10 % zeros": lambda x: torch.where(x > 1.2816, 0.0, torch.sigmoid(x)),
    "negative": torch.tanh,
    "around 1": lambda x: 1 + 0.05 * torch.tanh(x),
}
# Heads don't mix, so that one call serves several kinds: where gates are "mixed", head h has kind h % 4.
MIXED_GATES = list(GATES)[:4]


def heads_of(kind: int, kinds: int, first: int = 0) -> slice:
    """The heads of one of several kinds of gate, counted from head `first`."""
    return slice((kind - first) % kinds, None, kinds)


def make_arguments(problem: Problem, device: str, what: str, seed: int = 0, gates: str = "sigmoid") -> Arguments:
    """What an implementation is called with: q, k, v, gate and, in training, dy, or the state of a decoding step."""
    generator = torch.Generator(device).manual_seed(seed)
    q, k, v, x, dy = (torch.randn(problem.shape, generator=generator, device=device) for _ in range(5))
    gate = torch.empty_like(x)
    kinds = MIXED_GATES if gates == "mixed" else [gates]
    for kind, name in enumerate(kinds):
        heads = heads_of(kind, len(kinds))
        gate[:, :, heads] = GATES[name](x[:, :, heads])
    inputs = (*(each.to(problem.dtype) for each in (q, k, v)), gate.to(problem.gate_dtype))
    if what == STEP:
        shape = (problem.B, problem.H, problem.D, problem.D)
        return (*inputs, torch.randn(shape, generator=generator, device=device, dtype=problem.state_dtype))
    return (*inputs, dy.to(problem.dtype)) if what == TRAINING else inputs


# ----------------------------------------------------------------------------------------------------------------------
# The oracle
# ----------------------------------------------------------------------------------------------------------------------


def oracle_gradients(*arguments: torch.Tensor, stretch: int = 16) -> list[torch.Tensor]:
    """The five gradients: autograd through the reference loop, `stretch` steps at a time from the last back.

    Arguments: q, k, v, gate, dy, the initial state and what arrives at the final one. All of time at once would keep
    every step's state, and PyTorch's gradient of a slice is as large as what it was cut from, which makes the work
    quadratic in T.
    """
    *sequences, initial_state, dstate = arguments
    parts = list(zip(*(x.split(stretch, dim=1) for x in sequences), strict=True))
    states = [initial_state]
    with torch.no_grad():
        for *part, _ in parts[:-1]:
            states.append(gated_delta_reference(*part, initial_state=states[-1], output_final_state=True)[1])
    gradients = []
    for (*part, part_dy), state in zip(reversed(parts), reversed(states), strict=True):
        leaves = [x.detach().requires_grad_() for x in (*part, state)]
        results = gated_delta_reference(*leaves[:4], initial_state=leaves[4], output_final_state=True)
        *gradients_here, dstate = torch.autograd.grad(results, leaves, (part_dy, dstate))
        gradients.append(gradients_here)
    gradients.reverse()
    return [torch.cat(list(each), dim=1) for each in zip(*gradients, strict=True)] + [dstate]


def exact(what: str, arguments: Sequence[torch.Tensor], stretch: int = 256, lead: int = 128) -> list[torch.Tensor]:
    """In float64: [y] of q, k, v, gate or, in training with dy, the gradients of q, k, v, gate.

    States of zeros unless the initial state and the final one's gradient follow; then there is a fifth gradient. Of a
    decoding step y and the state.

    Long sequences whose gates forget are cut in stretches that the loop takes side by side, each with `lead` steps
    before and behind it: over those steps every product of gates must be below 1e-20, far less than float64 resolves.
    Else the loop takes all of time in one go.
    """

    def whole(sequences: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if what == FORWARD:
            return [gated_delta_reference(*sequences)[0]]
        zeros = torch.zeros_like(sequences[0][:, 0, :, :, None] * sequences[2][:, 0, :, None])
        return oracle_gradients(*sequences, zeros, zeros)[:4]

    sequences = [x.double() for x in arguments]
    B, T = sequences[0].shape[:2]
    if what == STEP:
        return list(gated_delta_reference(*sequences[:4], initial_state=sequences[4], output_final_state=True))
    if len(sequences) > 5:
        return oracle_gradients(*sequences)
    if T <= stretch + 2 * lead:
        return whole(sequences)
    count = math.ceil(T / stretch)
    padded = [torch.nn.functional.pad(x, (0, 0, 0, 0, lead, lead + count * stretch - T)) for x in sequences]
    parts = [x.unfold(1, stretch + 2 * lead, stretch).movedim(-1, 2).flatten(0, 1) for x in padded]
    gate = parts[3]
    kept = max(side.prod(dim=1).abs().max().item() for side in (gate[:, :lead], gate[:, -lead:]))
    if not kept < 1e-20:
        return whole(sequences)
    return [x[:, lead:-lead].unflatten(0, (B, count)).flatten(1, 2)[:, :T] for x in whole(parts)]


def relative_error(y: torch.Tensor, oracle: torch.Tensor) -> float:
    """Norm of the error over norm of the oracle; infinite for a wrong shape, NaN when y holds a NaN.

    Where the oracle is all zeros (gates that a dtype rounds to 0), so must y be.
    """
    if y.shape != oracle.shape:
        return math.inf
    error, size = (y.double() - oracle).norm().item(), oracle.norm().item()
    return error / size if size else math.inf if error else 0.0


def worst(errors: Iterable[float]) -> float:
    return max(errors, key=lambda error: (math.isnan(error), error))


class Judge:
    """The oracle of some batches and heads of one call, the last ones included. `gates`: as for make_arguments."""

    def __init__(self, what: str, arguments: Arguments, gates: str = "mixed") -> None:
        B, T, H, D = arguments[0].shape
        self.kinds = MIXED_GATES[:H] if gates == "mixed" else [gates]
        self.names = {FORWARD: ("y",), STEP: ("y", "state"), TRAINING: GRADIENTS[: 5 if len(arguments) > 5 else 4]}[
            what
        ]
        # So many steps times elements of state may the oracle's loop walk through; autograd keeps many states.
        pairs = max(len(MIXED_GATES), int((2.5e8 if what == TRAINING else 2e9) / (T * D * D)))
        stride = math.ceil(B * min(H, pairs) / pairs)
        self.first_head = max(0, H - pairs)
        self.batches = slice((B - 1) % stride, None, stride)
        self.oracle = exact(what, [self._chosen(x) for x in arguments])

    def _chosen(self, x: torch.Tensor) -> torch.Tensor:
        return x[self.batches, :, self.first_head :]

    def errors(self, results: Sequence[torch.Tensor]) -> Errors:
        """By kind of gate; NaN where anything of that kind is not finite, in heads that weren't chosen too."""
        errors: Errors = []
        for name, result, oracle in zip(self.names, results, self.oracle, strict=True):
            if name in ("state", "dstate"):
                result, oracle = result.movedim(1, 2), oracle.movedim(1, 2)
            for kind, gates in enumerate(self.kinds):
                chosen = heads_of(kind, len(self.kinds), self.first_head)
                error = relative_error(self._chosen(result)[:, :, chosen], oracle[:, :, chosen])
                finite = torch.isfinite(result[:, :, heads_of(kind, len(self.kinds))]).all()
                errors.append((gates, name, error if finite else math.nan))
        return errors


def poison(*tensors: torch.Tensor) -> None:
    """The allocator hands these blocks out again: an element of a result that nobody writes stays NaN."""
    _ = [torch.full_like(x, math.nan) for x in tensors]


# ----------------------------------------------------------------------------------------------------------------------
# Results
# ----------------------------------------------------------------------------------------------------------------------


def timing_of(samples: Sequence[float]) -> dict[str, float]:
    """For a Row, of seconds per call: the median, and half the distance between the quartiles relative to it."""
    low, middle, high = statistics.quantiles(samples, n=4) if len(samples) > 1 else 3 * samples
    return {"us": 1e6 * middle, "spread": (high - low) / 2 / middle}


class Measured:
    """What goes to JSON and comes back: fields by name, the problem's sizes and types among them, and what follows."""

    def record(self) -> dict[str, object]:
        values: dict[str, object] = {}
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if isinstance(value, Problem):
                value = dict(zip("BTHD", value.shape, strict=True))
                value |= {name: LONG_NAMES[getattr(self.problem, name)] for name in ("dtype", "gate_dtype")}
            values.update(value if isinstance(value, dict) else {each.name: value})
        return {**values, **{name: getattr(self, name) for name in self.follows}}

    @classmethod
    def take(cls, record: dict) -> "Measured":
        dtype, gate_dtype = (getattr(torch, record[name]) for name in ("dtype", "gate_dtype"))
        problem = Problem(*(record[name] for name in "BTHD"), dtype, None if gate_dtype == dtype else gate_dtype)
        names = [each.name for each in dataclasses.fields(cls) if each.name != "problem"]
        return cls(problem=problem, **{name: record[name] for name in names})


@dataclass
class Row(Measured):
    """One measurement: what ran, on which problem, how it was timed, and what came out."""

    follows = ("floor_share",)

    section: str
    name: str
    problem: Problem
    what: str = FORWARD  # or TRAINING
    method: str = "graph"  # or "eager"
    us: float | None = None
    spread: float | None = None
    floor_us: float | None = None
    error: float | None = None  # of y or of the worst gradient, with sigmoid gates
    peak_bytes: int | None = None  # allocated at a time by one training step, results included
    buffer_sets: int = 1
    note: str = ""

    @property
    def floor_share(self) -> float | None:
        return self.floor_us / self.us if self.us and self.floor_us else None


@dataclass
class Check(Measured):
    """One result against the oracle. Without a limit it is a peer's: shown, but no reason to fail."""

    follows = ("right",)

    section: str
    name: str
    problem: Problem
    gates: str
    of: str  # "y", or the gradient's name
    error: float | None  # None: there is none, and the note says why
    allowed: float | None = None
    note: str = ""

    @property
    def right(self) -> bool:
        return self.allowed is None or (self.error is not None and self.error <= self.allowed)  # NaN is not


@dataclass
class Report:
    """Everything measured so far. Lines are printed as they come, so that an interrupted run has shown them already."""

    environment: dict[str, str]
    stream: TextIO = sys.stdout
    checks: list[Check] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    last_title: str = ""

    @property
    def right(self) -> bool:
        return all(check.right for check in self.checks)

    def find(self, row: Row, name: str) -> Row | None:
        """The measurement of `name` that `row` compares with, of the same section where there is one."""
        key = (name, row.problem, row.what, row.method)
        found = [r for r in self.rows if (r.name, r.problem, r.what, r.method) == key and r.us]
        return min(found, key=lambda r: r.section != row.section, default=None)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.print(timing_tables(self, [row]))

    def say(self, text: str = "") -> None:
        print(text, file=self.stream, flush=True)

    def print(self, tables: "Sequence[Table]") -> None:
        for table in tables:
            if table.title != self.last_title:
                self.say(f"\n{table.title}\n{table.line(table.headers)}")
                self.last_title = table.title
            for cells in table.rows:
                self.say(table.line(cells))

    def write_json(self, path: str) -> None:
        measured = {"checks": [each.record() for each in self.checks], "rows": [each.record() for each in self.rows]}
        document = {"environment": self.environment, "right": self.right, **measured, "summary": summary(self)}
        # JSON has no NaN and no infinity: an error that is one of them becomes null.
        document = json.loads(json.dumps(document), parse_constant=lambda _: None)
        Path(path).write_text(json.dumps(document, indent=1) + "\n")

    @staticmethod
    def read_json(path: str) -> "Report":
        document = json.loads(Path(path).read_text())
        report = Report(document["environment"])
        report.checks = [Check.take(record) for record in document["checks"]]
        report.rows = [Row.take(record) for record in document["rows"]]
        return report

    def write_csv(self, path: str) -> None:
        """The timings, one a line."""
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, list(Row("", "", SEED).record()))
            writer.writeheader()
            writer.writerows(row.record() for row in self.rows)


def progress(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


def brief(error: BaseException) -> str:
    """Type and first line of an error, short enough for a table."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:140]


# ----------------------------------------------------------------------------------------------------------------------
# Tables, Markdown, plot: all from a Report alone
# ----------------------------------------------------------------------------------------------------------------------


@dataclass
class Table:
    title: str
    columns: dict[str, int]  # width by header
    describing: int  # so many columns at the left say what was measured; the others are figures, and notes at the end
    rows: list[list[str]] = field(default_factory=list)

    @property
    def headers(self) -> list[str]:
        return [header.strip() for header in self.columns]

    def line(self, cells: Sequence[str]) -> str:
        *figures, note = zip(cells, self.columns.values(), strict=True)
        parts = [f"{cell:{'' if i < self.describing else '>'}{width}}" for i, (cell, width) in enumerate(figures)]
        return f"{''.join(parts)}  {note[0]}".rstrip()

    def markdown(self) -> str:
        """Without empty columns; a description that is the same in all rows stands above the table."""
        columns = [column for column in zip(self.headers, *self.rows, strict=True) if any(column[1:])]
        same = []
        for column in columns[: self.describing]:
            if len(self.rows) > 1 and len(set(column[1:])) == 1:
                same.append(f"{column[0]} {column[1]}".strip())
                columns.remove(column)
        above = f"{self.title}. In all rows: {', '.join(same)}." if same else f"{self.title}."
        header, *rows = (f"| {' | '.join(cells)} |" for cells in zip(*columns, strict=True))
        text = "\n".join([header, "|---" * len(columns) + "|", *rows])
        if len(rows) > 24:
            return f"<details><summary>{above}</summary>\n\n{text}\n\n</details>"
        return f"{above}\n\n{text}"


def number(value: float | None, form: str = ".2f", factor: float = 1, unit: str = "") -> str:
    return "" if value is None else f"{factor * value:{form}}{unit}"


def error_text(checks: Sequence[Check]) -> str:
    """The worst of them; ! marks what is out of tolerance."""
    errors = [check.error for check in checks]
    text = "failed" if None in errors else number(worst(errors), ".1e") if errors else ""
    return text if all(check.right for check in checks) else f"{text} !"


def microseconds(us: float | None) -> str:
    """As many digits as the spread of a good measurement leaves."""
    return number(us, ".2f" if us and us < 10 else ".1f" if us and us < 1000 else ".0f")


SECTIONS = {
    "precision": "Precision",
    "seed": "Seed shape",
    "short": "Short and decode-like shapes",
    "decode": "Decoding",
    "training": "Training shapes",
    "long": "Long sequences",
    "grid": "Grid",
    "sweep": "Time against T and against D",
    "shapes": "Shapes asked for",
    "compiled": "The reference loop under torch.compile, seed shape",
}


def title_of(row: Row) -> str:
    return f"{SECTIONS[row.section]}, {row.what}"


PROBLEM_COLUMNS = {"": 27, "(B, T, H, D)": 21, "dtype": 9}
TIMING_COLUMNS = {"timing": 6, "floor us": 10, "us": 10, "+-": 8, "of floor": 9, "x ours": 8, "error": 9, "MiB": 7}


def timing_tables(report: Report, rows: Sequence[Row]) -> list[Table]:
    found: dict[str, Table] = {}
    for row in rows:
        ours = None if row.name == OURS else report.find(row, OURS)
        times_ours = row.us / ours.us if ours and row.us else None
        share = row.floor_share
        cells = [
            *(row.name, str(row.problem.shape), row.problem.types, row.method),
            microseconds(row.floor_us),
            microseconds(row.us),
            number(row.spread, ".1f", 100, " %"),
            number(share, ".1g" if share and share < 0.01 else ".0f", 100, " %"),
            number(times_ours, ".2f" if times_ours and times_ours < 10 else ".0f"),
            number(row.error, ".1e"),
            number(row.peak_bytes, ".0f", 2**-20),
            row.note,
        ]
        table = Table(title_of(row), {**PROBLEM_COLUMNS, **TIMING_COLUMNS, " ": 0}, len(PROBLEM_COLUMNS) + 1)
        found.setdefault(table.title, table).rows.append(cells)
    return list(found.values())


def precision_tables(checks: Sequence[Check]) -> list[Table]:
    """One line for each implementation and problem, one column for each kind of gate."""
    found: dict[str, Table] = {}
    lines: dict[tuple, dict[str, list[Check]]] = {}
    for check in checks:
        if check.section == "precision":
            of = "y" if check.of == "y" else "the worst gradient"
            line = lines.setdefault((of, check.name, check.problem), {})
            line.setdefault(check.gates, []).append(check)
    for (of, name, problem), line in lines.items():
        title = f"Error of {of} by kind of gate: norm of the error / norm of the float64 result"
        columns = {**PROBLEM_COLUMNS, **{gates: 14 for gates in GATES}, "allowed": 10, " ": 0}
        first = next(iter(line.values()))[0]
        errors = [error_text(line.get(gates, [])) for gates in GATES]
        cells = [name, str(problem.shape), problem.types, *errors, number(first.allowed, ".1e"), first.note]
        found.setdefault(title, Table(title, columns, len(PROBLEM_COLUMNS))).rows.append(cells)
    return list(found.values())


def tables(report: Report) -> list[Table]:
    return precision_tables(report.checks) + timing_tables(report, report.rows)


def span(values: Sequence[float], unit: str = "") -> str:
    """ "3 %", or "3 % to 5 %"."""
    ends = [f"{end:{'.0f' if end >= 100 or unit else '.3g'}}{unit}" for end in (min(values), max(values))]
    return " to ".join(dict.fromkeys(ends))


def summary(report: Report) -> list[str]:
    """The figures that matter, a sentence for each section and way of timing."""
    sentences = []
    if wrong := [check for check in report.checks if not check.right]:
        sentences.append(f"WRONG: {len(wrong)} of {len(report.checks)} checks are out of tolerance.")
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in report.rows:
        if row.us:
            groups.setdefault((title_of(row), row.method), []).append(row)
    for (title, method), rows in groups.items():
        ours = [row for row in rows if row.name == OURS]
        parts = [f"{microseconds(ours[0].us)} us"] if len(ours) == 1 else []
        if method == "graph" and (shares := [100 * row.floor_share for row in ours if row.floor_share]):
            parts.append(f"{span(shares, ' %')} of the floor")
        for name in dict.fromkeys(row.name for row in rows if row.name not in (OURS, TOUCH, EMPTY)):
            pairs = [(row.us, report.find(row, OURS)) for row in rows if row.name == name]
            if ratios := [us / base.us for us, base in pairs if base]:
                longer = f"{name} takes {span(ratios)} times as long"
                parts.append(longer if max(ratios) > 1 else f"{1 / max(ratios):.3g} times {name}")
        if parts:
            where = f"{title} at {ours[0].problem}" if len(ours) == 1 else title
            sentences.append(f"{where}, {'in a graph' if method == 'graph' else 'eager'}: {'; '.join(parts)}.")
    return sentences


def share_chart(report: Report) -> str:
    """A chart in text: the share of the floor where memory traffic should count alone."""
    rows = [r for r in report.rows if r.section in ("training", "long") and (r.name, r.method) == (OURS, "graph")]
    rows = [row for row in rows if row.what == FORWARD and row.floor_share]
    if not rows:
        return ""
    rows.sort(key=lambda row: -row.floor_share)
    scale = "".join(f"{mark:<10}" for mark in ("0", "25", "50", "75", "100 %")).rstrip()
    lines = [f"{'share of the floor, forward':36}{scale}"]
    for row in rows:
        bar = "#" * round(40 * row.floor_share)
        lines.append(f"{row.problem!s:36}{bar} {100 * row.floor_share:.0f} %")
    return "\n".join(["```text", *lines, "```"])


def run_of(report: Report) -> str:
    """Where and when, in a line."""
    keys = ("GPU", "CPU", "torch", "CUDA", "triton", "FLA", "copy rate", "date")
    found = {key: report.environment[key] for key in keys if key in report.environment}
    return ", ".join(text if key in ("GPU", "CPU", "date") else f"{key} {text}" for key, text in found.items())


def markdown_blocks(report: Report) -> dict[str, str]:
    """README's generated blocks by name, markers included."""
    run = run_of(report)
    sentences = "\n".join(f"- {sentence}" for sentence in summary(report))
    texts = {
        "figures": [f"One run of `bench.py`: {run}.", sentences, share_chart(report)],
        "tables": [f"One run of `bench.py`: {run}.", *(table.markdown() for table in tables(report))],
    }
    blocks = {}
    for name, parts in texts.items():
        text = "\n\n".join(part for part in parts if part)
        blocks[name] = f"<!-- bench.py --markdown: {name} -->\n\n{text}\n\n<!-- end of {name} -->"
    return blocks


# Name, or None for the floor: line, marker, grey that stays apart from its neighbours' in print.
STYLES = {
    None: ("--", "", "#777777"),
    OURS: ("-", "o", "#000000"),
    LOOP: (":", "s", "#0072b2"),
    "FLA chunk": ("-.", "^", "#d55e00"),
    "FLA recurrent": ((0, (6, 2)), "v", "#44aa77"),
}


def sweep_panels(report: Report) -> list[tuple[str, list[Row]]]:
    """For each panel of the plot: "T" or "D", and the rows that differ in that size and in the implementation alone."""
    panels = []
    for what, axis in itertools.product((FORWARD, TRAINING), "TD"):
        rows = [row for row in report.rows if (row.section, row.what) == ("sweep", what) and row.us]
        fixed = Counter(replace(row.problem, **{axis: 0}) for row in rows if row.name == OURS).most_common(1)
        rows = [row for row in rows if fixed and replace(row.problem, **{axis: 0}) == fixed[0][0]]
        panels.append((axis, sorted(rows, key=lambda row: getattr(row.problem, axis))))
    return [panel for panel in panels if panel[1]]


def write_plot(report: Report, path: str) -> None:
    """Time against T and against D: ours, the floor and the peers, on log axes."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    panels = sweep_panels(report)
    if not panels:
        progress(f"--plot: nothing of section sweep was measured, so {path} is not written")
        return
    lines = math.ceil(len(panels) / 2)
    figure, axes = pyplot.subplots(lines, 2, figsize=(11, 4.2 * lines), squeeze=False, layout="constrained")
    for panel, (axis, rows) in zip(axes.flat, panels, strict=False):
        points: dict[str | None, list[tuple[int, float]]] = {None: []}
        for row in rows:
            size = getattr(row.problem, axis)
            points.setdefault(row.name, []).append((size, row.us))
            if row.name == OURS and row.floor_us:
                points[None].append((size, row.floor_us))
        for name, pairs in points.items():
            style, marker, colour = STYLES.get(name, ("-", "x", "#aaaaaa"))
            look = {"ls": style, "marker": marker, "color": colour, "lw": 2.4 if name == OURS else 1.5}
            panel.plot([x for x, _ in pairs], [y for _, y in pairs], **look, label=name or "floor: every byte once")
        fixed = ", ".join(f"{name} = {getattr(rows[0].problem, name)}" for name in "BTHD" if name != axis)
        panel.set(xscale="log", yscale="log", ylabel="microseconds per call", title=f"{rows[0].what} against {axis}")
        panel.set_xlabel(f"{axis}   ({fixed}, {rows[0].problem.types}, {rows[0].method})")
        panel.set_xticks([x for x, _ in points[OURS]], [str(x) for x, _ in points[OURS]])
        panel.minorticks_off()
        panel.grid(True, color="#dddddd", lw=0.6)
    for empty in list(axes.flat)[len(panels) :]:
        empty.remove()
    named = {label: line for panel in axes.flat for line, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    figure.legend(named.values(), named, loc="outside lower center", ncols=len(named), frameon=False, handlelength=4)
    figure.suptitle(textwrap.fill(f"gated_delta_jit, {run_of(report)}", 110), fontsize="medium")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


# ----------------------------------------------------------------------------------------------------------------------
# Clocks
# ----------------------------------------------------------------------------------------------------------------------


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds_of(call: Call, count: int = 1) -> float:
    """Wall time per call of so many."""
    synchronize()
    start = time.perf_counter()
    for _ in itertools.repeat(None, count):
        call()
    synchronize()
    return (time.perf_counter() - start) / count


def time_eager(
    calls: dict[str, Call], rounds: int, round_seconds: float, limit_seconds: float
) -> dict[str, dict[str, float]]:
    """Wall time per call of each of `calls`, taken in turn within every round so that drift of the host hits all alike.

    A sample is a loop of up to 1000 calls that ends with a synchronize; the first round warms up. On a machine so slow
    or busy that the rounds take longer than `limit_seconds`, fewer are run.
    """
    # The first call warms up, the second is an estimate.
    estimates = {name: [seconds_of(call), seconds_of(call)][1] for name, call in calls.items()}
    counts = {name: max(1, min(1000, round(round_seconds / seconds))) for name, seconds in estimates.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    gc.collect()
    gc.disable()
    deadline = time.perf_counter() + limit_seconds
    try:
        for round_index in range(1 + rounds):
            if round_index > 1 and time.perf_counter() > deadline:
                break
            for name, call in calls.items():
                seconds = seconds_of(call, counts[name])
                if round_index > 0:
                    samples[name].append(seconds)
    finally:
        gc.enable()
    return {name: timing_of(values) for name, values in samples.items()}


class CallGraph:
    """`count` calls, taken from `calls` in rotation, captured in one CUDA graph.

    The latest result of every buffer set stays alive, so that rotated calls write to different memory.
    """

    def __init__(self, calls: Sequence[Call], count: int) -> None:
        self.count = count
        self.results: list[object] = [None] * len(calls)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for i in range(count):
                self.results[i % len(calls)] = calls[i % len(calls)]()

    def replay(self, times: int) -> list[float]:
        """Seconds per call of each of `times` replays.

        All replays are enqueued before the first result is read: the host runs ahead and its launch cost stays hidden.
        """
        events = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
        torch.cuda.synchronize()
        events[0].record()
        for event in events[1:]:
            self.graph.replay()
            event.record()
        torch.cuda.synchronize()
        milliseconds = [before.elapsed_time(after) for before, after in itertools.pairwise(events)]
        return [1e-3 * x / self.count for x in milliseconds]


def time_graph(calls: Sequence[Call], quick: bool = False, seconds: float | None = None) -> dict[str, float]:
    """GPU time per call in a replayed CUDA graph; `calls` holds the same call on one or more sets of buffers.

    A graph holds enough calls (at most about 100) for 0.4 ms, so that the gap between replays does not count. With
    `seconds` the measurement takes about so long, at the price of precision.
    """
    estimates = 3 if seconds else 5
    warm = seconds / 3 if seconds else 0.03
    least, duration = (3, seconds) if seconds else (12, 0.02 if quick else 0.06)
    # On a side stream: autograd remembers streams, and a capture must not meet the default one.
    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        for call in calls:
            # Twice: the first call may compile or tune, which a capture does not allow.
            call()
            call()
    torch.cuda.synchronize()
    sets = len(calls)
    count = sets
    while True:
        graph = CallGraph(calls, count)
        graph.replay(estimates - 2)
        per_call = max(1e-7, statistics.median(graph.replay(estimates)))
        wanted = sets * max(1, round(min(400e-6 / per_call, 100) / sets))
        # A short graph shows mostly the gap between replays, so the estimate is taken again on a longer one.
        if wanted <= 1.5 * count:
            break
        del graph
        count = wanted
    per_replay = count * per_call
    # The clock of an idle GPU needs some 30 ms of work to rise.
    graph.replay(max(1, min(300, math.ceil(warm / per_replay))))
    repeats = max(least, min(200, math.ceil(duration / per_replay)))
    # The first replays run while the host has no lead yet.
    return timing_of(graph.replay(repeats + 2)[2:])


def raise_interrupt(failure: Exception) -> None:
    """Ctrl-C during a capture surfaces as the capture's own failure."""
    if isinstance(failure.__context__, KeyboardInterrupt):
        raise KeyboardInterrupt from failure


def peak_memory(call: Call) -> int:
    """Bytes that `call` allocates at most at any time, its results included. The first call warms up."""
    call()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = call()
    torch.cuda.synchronize()
    del results
    return torch.cuda.max_memory_allocated() - before


def free_memory() -> None:
    """Graphs and large problems leave blocks behind that fit no later one."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ----------------------------------------------------------------------------------------------------------------------
# The limits of the machine: empty launch, touch, copy
# ----------------------------------------------------------------------------------------------------------------------

if triton is not None:

    @triton.jit
    def empty_kernel():
        pass

    @triton.jit
    def touch_kernel(q, k, v, gate, y, size, BLOCK: tl.constexpr):
        """Read every element of the four inputs once, write every element of the output once."""
        offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < size
        q_block = tl.load(q + offsets, mask=mask)
        k_block = tl.load(k + offsets, mask=mask)
        v_block = tl.load(v + offsets, mask=mask)
        gate_block = tl.load(gate + offsets, mask=mask)
        tl.store(y + offsets, q_block * k_block + v_block * gate_block, mask=mask)


def touch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """The least that any implementation must do: read q, k, v, gate and write something of y's size that needs them."""
    y = torch.empty_like(v)
    size = y.numel()
    # 128 threads of 16 bytes each per array; twice that for large problems.
    block = 2048 // y.element_size()
    if size > 1 << 20:
        block *= 2
    touch_kernel[(triton.cdiv(size, block),)](q, k, v, gate, y, size, BLOCK=block, num_warps=4)
    return y


def prepare_touch(*inputs: torch.Tensor) -> Call:
    """The floor must be honest: a touch kernel that skipped bytes would make every share too low."""
    q, k, v, gate = (x.float() for x in inputs)
    if not torch.allclose(touch(*inputs).float(), q * k + v * gate, rtol=2e-2, atol=2e-2):
        raise RuntimeError("the touch kernel is wrong")
    return partial(touch, *inputs)


def copy_rate(device: str) -> float:
    """Bytes read plus bytes written per second by a large copy within the device's memory, outside a graph."""
    size = min(1 << 31, torch.cuda.mem_get_info()[0] // 8) if device == "cuda" else 1 << 26
    source = torch.rand(size // 4, device=device)
    copy = partial(torch.empty_like(source).copy_, source)
    seconds_of(copy, 4)
    # Eight in a row, so that launch and synchronize don't count.
    return 2 * source.nbytes / statistics.median(seconds_of(copy, 8) for _ in range(9))


def cache_bytes() -> int:
    """Of L2."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return getattr(properties, "L2_cache_size", 0) or 64 << 20


# ----------------------------------------------------------------------------------------------------------------------
# What is compared
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """An implementation, or a limit. `prepare` does what a caller does once, untimed, and returns the timed call.

    By what is to be computed: FORWARD's gets q, k, v, gate, and its call returns y; TRAINING's gets dy as well, and its
    call returns the gradients of q, k, v and of gate or, with `of_log_gate`, of the gate's logarithm. STEP's gets the
    state as well, float32, which it may update in place, and its call returns y and the state after the step.
    """

    name: str
    prepare: dict[str, Callable[..., Call]]
    of_log_gate: bool = False
    methods: tuple[str, ...] = ("graph", "eager")
    judged: bool = True

    def results(self, what: str, arguments: Arguments) -> list[torch.Tensor]:
        """Of one call: [y], the gradients of q, k, v, gate, or [y, state]."""
        if what == STEP:
            arguments = (*arguments[:4], arguments[4].clone())
        results = self.prepare[what](*arguments)()
        if what == FORWARD:
            return [results]
        if self.of_log_gate and what == TRAINING:
            return [*results[:3], results[3].double() / arguments[3].double()]
        return list(results)


def training_step(function: Callable[..., torch.Tensor], *arguments: torch.Tensor) -> Call:
    """Forward and backward of `function` through autograd: the gradients of its arguments. The last argument is dy.

    The inputs are leaves that stay where they are, so that the call can be captured.
    """
    *inputs, dy = arguments
    leaves = tuple(x.detach().requires_grad_() for x in inputs)
    return lambda: torch.autograd.grad(function(*leaves), leaves, dy)


def from_module(name: str, module: torch.nn.Module) -> Candidate:
    return Candidate(name, {FORWARD: partial(partial, module), TRAINING: partial(training_step, module)})


def loop_step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gate: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of the loop as people write it, in place. q, k, v, gate: (B, 1, H, D)."""
    state.mul_(gate[:, 0].unsqueeze(-2)).add_(k[:, 0].unsqueeze(-1) * v[:, 0].unsqueeze(-2))
    return (q[:, 0].unsqueeze(-1) * state).sum(-2).to(q.dtype).unsqueeze(1), state


def prepare_step(function: Callable[..., torch.Tensor], *arguments: torch.Tensor) -> Call:
    """Ours. Its arrays have no axis of time."""
    *inputs, state = arguments
    inputs = [x.squeeze(1) for x in inputs]
    return lambda: (function(*inputs, state).unsqueeze(1), state)


def prepare_null(*arguments: torch.Tensor) -> Call:
    """What autograd alone costs: a function with our operator's signature whose results are ready beforehand."""
    *inputs, _ = arguments
    ready_y = torch.zeros_like(inputs[2])
    ready_gradients = tuple(torch.zeros_like(x) for x in inputs)

    class Null(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, gate, initial_state, scale, output_final_state, log_gate):
            return ready_y

        @staticmethod
        def backward(ctx, dy):
            return (*ready_gradients, None, None, None, None)

    return training_step(lambda *leaves: Null.apply(*leaves, None, 1.0, False, False), *arguments)


LIMITS = [
    Candidate("torch.add(q, k)", {FORWARD: lambda q, k, *_: partial(torch.add, q, k)}, judged=False),
    Candidate("null autograd.Function", {TRAINING: prepare_null}, methods=("eager",), judged=False),
]
if triton is not None:
    LIMITS += [
        Candidate(EMPTY, {FORWARD: lambda *_: empty_kernel[(1,)]}, methods=("graph",), judged=False),
        Candidate(TOUCH, {FORWARD: prepare_touch}, methods=("graph",), judged=False),
    ]


def gradients_with_states(function: Callable, *arguments: torch.Tensor) -> Sequence[torch.Tensor]:
    """Ours, all five, from an initial state, with gradients that arrive through y and through the final state."""
    *inputs, dy, initial_state, dfinal_state = arguments
    leaves = [x.detach().requires_grad_() for x in (*inputs, initial_state)]
    results = function(*leaves[:4], initial_state=leaves[4], output_final_state=True)
    return torch.autograd.grad(results, leaves, (dy, dfinal_state))


def load_fla() -> tuple[list[Candidate], str]:
    """Both implementations of this operator in flash-linear-attention, and its version or why there is none.

    It wants the natural log of the gate in float32, which is prepared outside the timing.
    """
    try:
        version = importlib.metadata.version("fla-core")
    except importlib.metadata.PackageNotFoundError:
        return [], "not installed (pip install fla-core)"
    progress(f"importing fla-core {version}")
    warnings.filterwarnings("ignore", module=r"fla\b")
    try:
        from fla.ops.common.fused_recurrent import fused_recurrent
        from fla.ops.gsa.chunk_bwd import chunk_gsa_bwd_k
        from fla.ops.gsa.chunk_fwd import chunk_gsa_fwd_k
        from fla.ops.utils import chunk_local_cumsum
        from fla.ops.utils.constant import RCP_LN2
    except Exception as error:  # a peer that does not import is a result, whatever it raises
        return [], f"{version}, import fails: {brief(error)}"

    def step(q, k, v, log_gate, state) -> tuple[torch.Tensor, torch.Tensor]:
        return fused_recurrent(q, k, v, gv=log_gate, scale=1.0, initial_state=state, output_final_state=True)

    def recurrent(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_gate: torch.Tensor) -> torch.Tensor:
        return fused_recurrent(q, k, v, gv=log_gate, scale=1.0)[0]

    def chunk(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_gate: torch.Tensor) -> torch.Tensor:
        summed = chunk_local_cumsum(log_gate, chunk_size=64, scale=RCP_LN2)
        return chunk_gsa_fwd_k(q, k, v, summed, scale=1.0, chunk_size=64)[2]

    def chunk_training(q, k, v, log_gate, dy) -> Sequence[torch.Tensor]:
        # FLA has no autograd around this half of Gated Slot Attention: its two parts are called one after the other.
        summed = chunk_local_cumsum(log_gate, chunk_size=64, scale=RCP_LN2)
        h, _, y = chunk_gsa_fwd_k(q, k, v, summed, scale=1.0, chunk_size=64)
        # What the other half adds to the log gate's gradient; overwritten.
        dg = torch.zeros_like(log_gate)
        others = {"h0": None, "dht": None, "scale": 1.0, "chunk_size": 64}
        return chunk_gsa_bwd_k(q=q, k=k, v=v, g=summed, h=h, o=y, do=dy, dg=dg, **others)[:4]

    def with_log(function: Callable[..., object]) -> Callable[..., Call]:
        return lambda q, k, v, gate, *others: partial(function, q, k, v, gate.float().log(), *others)

    def train_recurrent(q, k, v, gate, dy) -> Call:
        return training_step(recurrent, q, k, v, gate.float().log(), dy)

    prepare = {FORWARD: with_log(recurrent), TRAINING: train_recurrent, STEP: with_log(step)}
    peers = [
        Candidate("FLA recurrent", prepare, of_log_gate=True),
        Candidate("FLA chunk", {FORWARD: with_log(chunk), TRAINING: with_log(chunk_training)}, of_log_gate=True),
    ]
    return peers, version


def silence_process() -> None:
    """For the child processes of precompile_fla, which meet errors that the parent meets too, and shows."""
    os.environ["FLA_CACHE_RESULTS"] = "0"
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def call_fla_once(problem: Problem, what: str) -> None:
    """In a child process: both implementations."""
    for peer in load_fla()[0]:
        with contextlib.suppress(Exception):  # the parent meets the same error and shows it
            peer.results(what, make_arguments(problem, "cuda", what))
    synchronize()
    free_memory()  # the process goes on with the next case


def precompile_fla(cases: Sequence[tuple[Problem, str]]) -> None:
    """Fill Triton's cache with FLA's kernels, several head sizes, dtypes and directions at a time.

    FLA's autotuner compiles some 90 variants of each, one after another: about a minute for every head size. This only
    compiles them side by side; the choice among them is still FLA's own, made in this process on a quiet GPU.
    """
    cases = list({(p.H, p.D, p.dtype, what): (p, what) for p, what in cases}.values())
    workers = max(1, (os.cpu_count() or 1) // 2)
    progress(f"compiling FLA's kernels for {len(cases)} head sizes and dtypes, {workers} at a time: allow minutes")
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(workers, context, silence_process)
    try:
        futures = [pool.submit(call_fla_once, *case) for case in cases]
        for done, future in enumerate(concurrent.futures.as_completed(futures), start=1):
            failure = future.exception()
            progress(f"  {done} of {len(cases)} compiled" + (f" ({brief(failure)})" if failure else ""))
    finally:
        pool.shutdown(cancel_futures=True)


# ----------------------------------------------------------------------------------------------------------------------
# Measuring
# ----------------------------------------------------------------------------------------------------------------------

# A problem whose buffers need more than this, or than nine tenths of what is free, is left out.
LARGEST = 40e9
# Longer loops are left out: backward through the loop is quadratic in T.
LOOP_STEPS = {FORWARD: 2048, TRAINING: 1024, STEP: 1}


@dataclass(frozen=True)
class Section:
    """Problems that are measured alike."""

    name: str
    what: str
    problems: Sequence[Problem]
    beside: Sequence[Candidate] = ()  # what is measured beside ours
    methods: tuple[str, ...] = ("graph",)
    seconds: float | None = None  # so long may one measurement in a graph take
    slow: float = 0.25  # what takes more seconds than this for a call isn't timed


@dataclass
class Bench:
    """One run."""

    report: Report
    library: ModuleType
    device: str
    quick: bool
    bytes_per_second: float = math.nan

    @property
    def ours(self) -> Candidate:
        ours = from_module(OURS, self.library.ModelNew())
        ours.prepare[STEP] = partial(prepare_step, self.library.gated_delta_step)
        return ours

    def tolerance(self, problem: Problem, of: str) -> float:
        """By the kernel that may serve the problem."""
        if of == "state":
            return TOLERANCE[problem.state_dtype]
        if of != "y":
            return GRADIENT_TOLERANCE[problem.dtype]
        looser = self.device == "cuda" and on_tensor_cores(problem)
        return (TENSOR_CORE_TOLERANCE if looser else TOLERANCE)[problem.dtype]

    def measure_copy_rate(self) -> None:
        progress("copy rate")
        self.bytes_per_second = copy_rate(self.device)
        self.report.environment["copy rate"] = f"{self.bytes_per_second / 1e12:.3g} TB/s read plus written"
        self.report.say(f"{'copy rate':16}{self.report.environment['copy rate']}")

    def measure_precision(self, what: str, problems: Sequence[Problem], others: Sequence[Candidate]) -> None:
        """Ours and others against the oracle, by kind of gate."""
        progress(f"precision, {what}, problems: {len(problems)}")
        for problem in problems:
            known = len(self.report.checks)
            # The loop in float64 is the oracle, and no peer has float64.
            candidates = [self.ours, *(others if problem.dtype != torch.float64 else [])]
            for gates in ["mixed"] if what == TRAINING else GATES:
                arguments = make_arguments(problem, self.device, what, 1, gates)
                judge = Judge(what, arguments, gates)
                for candidate in candidates:
                    self.judge("precision", what, candidate, problem, arguments, judge)
            if what == TRAINING:
                generator = torch.Generator(self.device).manual_seed(2)
                shape = (problem.B, problem.H, problem.D, problem.D)
                like = {"device": self.device, "dtype": problem.state_dtype}
                arguments += tuple(torch.randn(shape, generator=generator, **like) for _ in range(2))
                function = partial(partial, gradients_with_states, self.library.gated_delta)
                ours = Candidate(f"{OURS}, states", {what: function})
                self.judge("precision", what, ours, problem, arguments, Judge(what, arguments))
            self.report.print(precision_tables(self.report.checks[known:]))

    def judge(
        self, section: str, what: str, candidate: Candidate, problem: Problem, arguments: Arguments, judge: Judge
    ) -> tuple[float | None, str]:
        """Calls the candidate in poisoned memory. Its error, all being recorded, and why it isn't to be timed."""
        note = ""
        poison(*arguments)
        try:
            errors = judge.errors(candidate.results(what, arguments))
        except Exception as failure:  # a peer that fails is a result, and so are we
            if candidate.name == OURS and isinstance(failure, torch.cuda.OutOfMemoryError):
                raise
            note = brief(failure)
            errors = [(gates, of, None) for gates in judge.kinds for of in judge.names]
        checks = []
        for gates, of, error in errors:
            allowed = self.tolerance(problem, of) if candidate.name.startswith(OURS) else None
            checks.append(Check(section, candidate.name, problem, gates, of, error, allowed, note))
        self.report.checks.extend(checks)
        if note:
            return None, note
        for check in checks:
            if not check.right:
                excess = f"{check.error:.1e}, {check.allowed:.1e} is allowed"
                note = note or f"WRONG {check.of} with {check.gates} gates: {excess}"
        usual = [check for check in checks if check.gates == judge.kinds[0]]
        # Peers compute the gate's gradient by way of a logarithm; what it is worth is shown under precision.
        if not worst(check.error for check in usual if check.of != "dgate") <= PEER_LIMIT:
            note = note or "wrong result, not timed"
        return worst(check.error for check in usual), note

    def buffer_sets(self, problem: Problem, what: str) -> int:
        """One set while inputs and output fit well into L2, else enough to exceed twice its size."""
        if self.device == "cpu" or problem.bytes(what) < cache_bytes() / 8:
            return 1
        if problem.bytes(what) > 16 * cache_bytes():
            return 1  # it leaves nothing there that the next call could use
        return max(2, math.ceil(2 * cache_bytes() / problem.bytes(what)))

    def floor_us(self, section: Section, problem: Problem, inputs: Arguments) -> float:
        """Microseconds that the bytes take: those of the touch kernel where they fit into L2, else at the copy rate."""
        small = self.device == "cuda" and problem.bytes() < cache_bytes() / 8
        if small and section.what == FORWARD and triton is not None:
            try:
                return time_graph([prepare_touch(*inputs)], self.quick, section.seconds)["us"]
            except Exception as failure:  # without the touch kernel the rest is still worth having
                raise_interrupt(failure)
                progress(f"the touch kernel fails, the copy rate takes its place: {brief(failure)}")
        return 1e6 * problem.bytes(section.what) / self.bytes_per_second

    def run(self, section: Section) -> None:
        progress(f"{SECTIONS[section.name]}, {section.what}, shapes: {len(section.problems)}")
        for problem in section.problems:
            row = Row(section.name, OURS, problem, section.what, section.methods[0])
            row.buffer_sets = self.buffer_sets(problem, section.what)
            # Beside the buffers, the five float32 arrays that they are drawn as.
            needed = row.buffer_sets * problem.bytes(section.what) + 20 * math.prod(problem.shape)
            if self.device == "cuda" and needed > min(LARGEST, 0.9 * torch.cuda.mem_get_info()[0]):
                self.report.add(replace(row, note=f"needs {needed / 1e9:.0f} GB, left out"))
                continue
            try:
                self.measure(section, row)
            except torch.cuda.OutOfMemoryError as failure:
                self.report.add(replace(row, note=brief(failure)))
            if needed > 1 << 28:
                free_memory()

    def measure(self, section: Section, row: Row) -> None:
        """One problem: everything is judged first, then timed. `row`: what all of its rows have in common."""
        what, problem = section.what, row.problem
        candidates = [each for each in (self.ours, *section.beside) if what in each.prepare]
        candidates = [each for each in candidates if each.name != LOOP or problem.T <= LOOP_STEPS[what]]
        arguments = make_arguments(problem, self.device, what, 1, "mixed")
        judge = Judge(what, arguments)
        verdicts: dict[str, tuple[float | None, str]] = {}
        for candidate in candidates:
            if candidate.judged:
                verdicts[candidate.name] = self.judge(section.name, what, candidate, problem, arguments, judge)
        del arguments, judge
        buffers = [make_arguments(problem, self.device, what, seed) for seed in range(row.buffer_sets)]
        floor_us = self.floor_us(section, problem, buffers[0][:4])

        eager_rows: list[Row] = []
        in_turn: dict[str, Call] = {}
        for candidate in candidates:
            methods = [method for method in section.methods if method in candidate.methods]
            if not methods:
                continue
            error, note = verdicts.get(candidate.name, (None, ""))
            row = replace(row, name=candidate.name, method=methods[0], error=error, note=note, peak_bytes=None)
            row.floor_us = floor_us if candidate.judged else None
            try:
                calls = [] if note else [candidate.prepare[what](*each) for each in buffers]
                if calls and (seconds := seconds_of(calls[0])) > section.slow:
                    row.note = f"{1e3 * seconds:.0f} ms a call, not timed"
                elif calls and what == TRAINING and self.device == "cuda":
                    row.peak_bytes = peak_memory(calls[0])
            except Exception as failure:  # a peer that fails is a result
                row.note = brief(failure)
            if row.note:
                self.report.add(row)
                continue
            if "graph" in methods:
                self.report.add(self.in_graph(row, calls, section))
            if "eager" in methods:
                eager_rows.append(replace(row, method="eager", buffer_sets=1))
                in_turn[candidate.name] = calls[0]
        # Rounds, seconds for each round of a call, seconds in all.
        pace = (7 if self.quick else 25, 0.02, 6.0) if self.device == "cuda" else (3 if self.quick else 7, 0.05, 2.0)
        timings = time_eager(in_turn, *pace)
        for row in eager_rows:
            self.report.add(replace(row, **timings[row.name]))

    def in_graph(self, row: Row, calls: Sequence[Call], section: Section) -> Row:
        """The row with its time in a graph; a failure becomes its note."""
        try:
            return replace(row, **time_graph(calls, self.quick, section.seconds))
        except Exception as failure:  # one row that fails must not end the run
            raise_interrupt(failure)
            return replace(row, note=brief(failure))


# ----------------------------------------------------------------------------------------------------------------------
# The run
# ----------------------------------------------------------------------------------------------------------------------

BF16, F32 = torch.bfloat16, torch.float32
PRECISION_DTYPES = list(TOLERANCE)
PRECISE = Problem(16, 256, 8, 64)  # large enough for tensor cores
TRAINING_SHAPES = [
    Problem(8, 2048, 16, 64, BF16),
    Problem(8, 2048, 16, 64),
    Problem(8, 2048, 16, 128, BF16),
    Problem(16, 2048, 16, 64, BF16),
    Problem(16, 2048, 32, 128, BF16),
    Problem(8, 2048, 16, 128),
    Problem(4, 4096, 16, 256, BF16),
    Problem(8, 2047, 16, 64, BF16),
    Problem(8, 2048, 16, 64, torch.float16),
    Problem(8, 2048, 16, 64, BF16, F32),
]
LONG_SHAPES = [Problem(1, 8192, 8, 64, BF16), Problem(1, 32768, 16, 128, BF16), Problem(1, 131072, 4, 64, BF16)]


def short_shapes(quick: bool) -> list[Problem]:
    """Where launch and latency count as much as bytes: few steps of many heads, 64 to 512 steps of 8 or 64 heads."""
    sizes, lengths = ([16, 64], [128]) if quick else ([16, 32, 64], [64, 128, 256, 512])
    decode = [Problem(64, T, 16, D, BF16) for D in (64, 128) for T in (1, 4)]
    points = itertools.product((F32, BF16), sizes, lengths, (1, 8))
    return decode[: 2 if quick else 4] + [Problem(B, T, 8, D, dtype) for dtype, D, T, B in points]


# A step of many sequences, and of few.
DECODE_SHAPES = [
    Problem(64, 1, 16, 128, BF16),
    Problem(64, 1, 16, 64, BF16),
    Problem(64, 1, 16, 128),
    Problem(256, 1, 16, 128, BF16),
    Problem(8, 1, 16, 128, BF16),
    Problem(1, 1, 16, 128, BF16),
]


def grid_shapes(quick: bool) -> list[Problem]:
    """From one pair (b, h) and one step to 1024 pairs of 8192 steps; at most 16 heads a batch."""
    pairs = [1, 16, 256] if quick else [1, 4, 16, 64, 256, 1024]
    lengths = [1, 128, 8192] if quick else [1, 16, 128, 1024, 8192]
    sizes = [16, 64, 128] if quick else [16, 32, 64, 128, 256]
    points = itertools.product((F32, BF16), sizes, lengths, pairs)
    return [Problem(max(1, n // 16), T, min(n, 16), D, dtype) for dtype, D, T, n in points]


def sweep_shapes(base: Problem, lengths: Sequence[int], sizes: Sequence[int]) -> list[Problem]:
    """For the plot: T with D fixed, then D with T fixed; one point is in both."""
    return list(dict.fromkeys([replace(base, T=T) for T in lengths] + [replace(base, D=D) for D in sizes]))


def plan(options: argparse.Namespace, device: str, peers: Sequence[Candidate]) -> list[Section]:
    """The timed sections in the order in which they run."""
    quick = options.quick
    loop = from_module(LOOP, Model())
    loop.prepare[STEP] = partial(partial, loop_step)
    beside = [loop, *peers]
    on_cpu = device == "cpu"
    both = {"methods": ("eager",) if on_cpu else ("graph", "eager"), "slow": 5.0}
    sections: list[Section] = []
    for what in options.directions:
        sections += [
            Section("shapes", what, options.shapes, beside, **both),
            Section("seed", what, [] if options.shapes else [SEED], [*LIMITS, *beside], **both),
        ]
        shapes = dict.fromkeys(SECTIONS, ())
        if options.shapes:
            continue
        if what == FORWARD:
            decode = [Problem(4, 1, 16, 64)] if on_cpu else DECODE_SHAPES[: 2 if quick else None]
            sections.append(Section("decode", STEP, in_dtype(decode, options.dtype), beside, **both))
        if on_cpu:
            shapes["short"] = [Problem(16, 1, 16, 64)]
            shapes["training"] = [Problem(4, 256 if what == FORWARD else 128, 8, 64)]
            shapes["long"] = [Problem(1, 1024, 8, 64)] if what == FORWARD and not quick else []
            shapes["sweep"] = sweep_shapes(Problem(1, 256, 8, 32), (16, 64, 256, 1024), (8, 16, 32, 64, 128))
        else:
            lengths = (16, 64, 256, 1024, 2048, 4096, 16384)
            shapes["sweep"] = sweep_shapes(TRAINING_SHAPES[0], lengths, (16, 32, 64, 128, 256))
            if what == FORWARD:
                shapes["short"], shapes["grid"] = short_shapes(quick), grid_shapes(quick)
            few = what == TRAINING or quick
            shapes["training"] = TRAINING_SHAPES[: 3 if few else None]
            shapes["long"] = [] if what == TRAINING and quick else LONG_SHAPES[: 2 if few else None]
        for name, problems in shapes.items():
            problems = in_dtype(problems, options.dtype)
            if name == "grid":
                sections.append(Section(name, what, problems, seconds=0.03, slow=0.02))
            elif on_cpu:
                sections.append(Section(name, what, problems, beside, **both))
            else:
                sections.append(Section(name, what, problems, beside if name == "sweep" else peers))
    sections = [section for section in sections if section.name in options.only and section.problems]
    # Compiling takes minutes, so that it comes last.
    if options.torch_compile and not on_cpu and any(section.name == "seed" for section in sections):
        compiled = from_module("torch.compile of the loop", torch.compile(Model(), dynamic=False))
        forward = replace(compiled, prepare={FORWARD: compiled.prepare[FORWARD]})
        sections.append(Section("compiled", FORWARD, [SEED], [forward], **both))
    return sections


def describe(library: ModuleType, device: str, fla: str) -> dict[str, str]:
    environment = {
        "date": datetime.date.today().isoformat(),
        "gated_delta_jit": library.__version__,
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or "none",
        "triton": triton.__version__ if triton is not None else "not installed",
        "python": platform.python_version(),
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        capability = f"sm_{properties.major}{properties.minor}"
        environment["GPU"] = f"{properties.name} ({capability}, {properties.multi_processor_count} SMs)"
        environment["FLA"] = fla
    else:
        cpuinfo = Path("/proc/cpuinfo")
        lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        environment["CPU"] = f"{[*names, platform.machine()][0]}, {torch.get_num_threads()} threads"
    return environment


DTYPE_NAMES = {name: dtype for names in (LONG_NAMES, SHORT_NAMES) for dtype, name in names.items()}


def parse_dtype(text: str) -> torch.dtype:
    if text not in DTYPE_NAMES:
        raise argparse.ArgumentTypeError(f"{text!r} is no type; there are {', '.join(DTYPE_NAMES)}")
    return DTYPE_NAMES[text]


def parse_shape(text: str) -> tuple[tuple[int, ...], torch.dtype | None, torch.dtype | None]:
    """B,T,H,D[:DTYPE[:GATE DTYPE]] as sizes and types."""
    numbers, *names = text.split(":")
    sizes = numbers.split(",")
    if len(sizes) != 4 or len(names) > 2 or not all(size.strip().isdecimal() and int(size) > 0 for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r} is not B,T,H,D[:DTYPE[:GATE DTYPE]] with four positive numbers")
    dtype, gate_dtype, *_ = [*(parse_dtype(name) for name in names), None, None]
    if gate_dtype not in (None, dtype) and not (gate_dtype == torch.float32 and dtype.itemsize == 2):
        raise argparse.ArgumentTypeError(f"{text!r}: the gate has the type of q, or is float32 beside half precision")
    return tuple(int(size) for size in sizes), dtype, None if gate_dtype == dtype else gate_dtype


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    description, _, text = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    direction = parser.add_mutually_exclusive_group()
    direction.add_argument("--forward", action="store_true", help="the forward alone")
    direction.add_argument("--backward", action="store_true", help="forward plus backward alone")
    names = [name for name in SECTIONS if name not in ("shapes", "compiled")]
    parser.add_argument("--only", metavar="SECTION", nargs="+", choices=names, help=", ".join(names))
    parser.add_argument("--shapes", metavar="SHAPE", nargs="+", type=parse_shape, help="B,T,H,D[:DTYPE[:GATE DTYPE]]")
    parser.add_argument("--dtype", type=parse_dtype, help=", ".join(DTYPE_NAMES))
    parser.add_argument("--quick", action="store_true", help="fewer shapes and repeats")
    parser.add_argument("--grid", action="store_true", help="add the section grid")
    parser.add_argument("--fla", action="store_true", help="add flash-linear-attention")
    parser.add_argument("--torch-compile", action="store_true", help="add the loop under torch.compile")
    for name, what in {"json": "everything measured", "csv": "the timings", "plot": "a picture of the sweep"}.items():
        parser.add_argument(f"--{name}", metavar="FILE", help=f"write {what} to FILE")
    parser.add_argument("--markdown", action="store_true", help="README's blocks on stdout")
    parser.add_argument("--from", dest="source", metavar="FILE", help="show an earlier run's JSON, measure nothing")
    options = parser.parse_args(arguments)
    if options.shapes and (options.only or options.grid or options.plot):
        parser.error("--shapes excludes --only, --grid and --plot")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    default = options.dtype or torch.float32
    options.shapes = [Problem(*sizes, dtype or default, gate) for sizes, dtype, gate in options.shapes or []]
    options.directions = [TRAINING] if options.backward else [FORWARD] if options.forward else [FORWARD, TRAINING]
    only = options.only or [name for name in SECTIONS if name not in ("grid", "sweep")]
    options.only = {*only, *(["grid"] if options.grid else []), *(["sweep"] if options.plot else [])}
    for path in (Path(name) for name in (options.json, options.csv, options.plot) if name):
        # Now rather than after minutes of measuring.
        if not os.access(path if path.exists() else path.parent, os.W_OK) or path.is_dir():
            parser.error(f"{path} can't be written")
    return options


def run(bench: Bench, options: argparse.Namespace, peers: Sequence[Candidate]) -> None:
    """Everything asked for: precision first, and nothing is timed when it is wrong."""
    sections = plan(options, bench.device, peers)
    precise = [replace(SEED, dtype=dtype) for dtype in PRECISION_DTYPES]
    if bench.device == "cuda" and not options.quick:
        precise += [replace(PRECISE, dtype=dtype) for dtype in TENSOR_CORE_TOLERANCE]
    others = peers if "precision" in options.only and not options.shapes else []
    bench.measure_copy_rate()
    if peers:
        cases = [(problem, section.what) for section in sections if section.beside for problem in section.problems]
        cases += itertools.product(precise if others else [], options.directions)
        precompile_fla([case for case in cases if case[0].dtype != torch.float64])
    for what in options.directions:
        bench.measure_precision(what, precise, [from_module(LOOP, Model()), *others])
    if not bench.report.right:
        progress("nothing is timed, because results are wrong")
        return
    for section in sections:
        bench.run(section)


def write_results(report: Report, options: argparse.Namespace) -> None:
    report.say()
    for sentence in summary(report):
        report.say(sentence)
    if options.markdown:
        print("\n\n".join(markdown_blocks(report).values()), flush=True)
    if options.json:
        report.write_json(options.json)
    if options.csv:
        report.write_csv(options.csv)
    if options.plot:
        write_plot(report, options.plot)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    stream = sys.stderr if options.markdown else sys.stdout
    if options.source:
        try:
            report = Report.read_json(options.source)
        except (OSError, ValueError, KeyError, TypeError) as error:
            progress(f"{options.source} is no JSON of bench.py: {brief(error)}")
            return 2
        report.stream = stream
        report.print(tables(report))
        write_results(report, options)
        return 0 if report.right else 1
    try:
        # Here and not at the top: the first import compiles, which --help should not.
        import gated_delta_jit
    except RuntimeError as error:
        progress(f"gated_delta_jit could not be imported\n{error}")
        return 1

    start = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() and gated_delta_jit.HAS_CUDA else "cpu"
    if torch.cuda.is_available() and device == "cpu":
        progress("there is a GPU, but gated_delta_jit has no CUDA part (is nvcc on PATH?): timing the CPU")
    if device == "cpu" and (options.fla or options.torch_compile or options.grid):
        progress("--fla, --torch-compile and --grid are for GPUs and are left out")
    peers, fla = load_fla() if options.fla and device == "cuda" else ([], "left out")
    report = Report(describe(gated_delta_jit, device, fla), stream)
    for name, value in report.environment.items():
        report.say(f"{name:16}{value}")
    status = 0
    try:
        run(Bench(report, gated_delta_jit, device, options.quick), options, peers)
    except KeyboardInterrupt:
        progress("interrupted; what was measured is kept")
        status = 130
    finally:
        write_results(report, options)
    progress(f"{time.perf_counter() - start:.0f} s in all")
    if not report.right:
        progress("WRONG RESULT, see above")
        return 1
    return status


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
